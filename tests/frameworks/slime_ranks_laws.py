"""slime's loader, packing and converter with our layer on two tensor- or
context-parallel ranks."""

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import build_module
from safetensors.torch import load_file
from slime.backends.megatron_utils import hf_to_megatron
from slime.backends.megatron_utils.data import slice_with_cp
from slime.utils import accelerator
from slime.utils.distributed_utils import init_gloo_group, set_gloo_group
from torch import nn

from megatron_gdn.compat.one_process import end_one_process, start_one_process
from megatron_gdn.frameworks.slime import register_our_names
from megatron_gdn.hf import layer_from_hf, read_hf_config
from megatron_gdn.specs import gated_delta_net_spec
from tests.frameworks import tiny_models
from tests.frameworks.slime_laws import (  # which has SGLang's names
    CPU,
    LENGTHS,
    Wrapped,
    arguments,
    batch,
    built,
    logits,
    named_params_and_buffers,
    published,
)
from tests.parallel import make_config, parallel

LINEAR_LAYERS = "--num-layers 4", "--num-layers 3"


pytestmark = pytest.mark.usefixtures("forked_with_the_stand_in")


class OneLayer(nn.Module):
    """``decoder.layers.0.self_attention`` of a model, on this rank."""

    def __init__(self, folder) -> None:
        super().__init__()
        sizes = read_hf_config(folder).gdn
        self.config = make_config(
            tensor_model_parallel_size=2,
            layernorm_zero_centered_gamma=True,
            hidden_size=sizes.hidden_size,
            linear_num_key_heads=sizes.num_key_heads,
            linear_num_value_heads=sizes.num_value_heads,
            linear_key_head_dim=sizes.key_head_dim,
            linear_value_head_dim=sizes.value_head_dim,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        layer = nn.Module()
        layer.self_attention = build_module(
            gated_delta_net_spec("local"),
            config=self.config,
            layer_number=1,
            pg_collection=groups,
        )
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([layer])
        for parameter in self.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def loaded_and_sent(name: str, folder) -> tuple[dict, dict]:
    """This rank's parameters after slime's loader, and what its converter makes of all
    ranks'."""
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct import (
        HfWeightIteratorDirect,
    )

    accelerator._ACCELERATOR = CPU
    with parallel(tp=2):
        set_gloo_group(None)
        init_gloo_group()
        register_our_names()
        args = arguments(name, folder)
        model = Wrapped(Wrapped(OneLayer(folder)))
        hf_to_megatron.load_hf_weights(args, [model], folder)
        held = dict(
            model.module.module.decoder.layers[0].self_attention.named_parameters()
        )
        local = dict(named_params_and_buffers(args, [model]))
        iterator = HfWeightIteratorDirect(
            args, [model], tiny_models.MODELS[name][0], None
        )
        chunks = list(iterator.get_hf_weight_chunks(local))
        sent = {key: tensor for chunk in chunks for key, tensor in chunk}
    return {key: tensor.detach() for key, tensor in held.items()}, sent


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5"])
def test_each_tensor_parallel_rank_holds_its_heads_and_all_are_sent_as_published(
    name, pools, tmp_path
):
    published(name, tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    own = {
        key.partition(".linear_attn.")[2]: tensor
        for key, tensor in files.items()
        if ".layers.0.linear_attn." in key
    }
    model = read_hf_config(tmp_path)
    expected = layer_from_hf(own, model.gdn, tp_size=2, storage=model.storage)
    found = pools(2).run(loaded_and_sent, name, tmp_path)
    for part, (held, sent) in zip(expected, found, strict=True):
        assert held.keys() == part.keys()
        for key, tensor in part.items():
            assert torch.equal(held[key], tensor), key
        assert {key.partition(".linear_attn.")[2] for key in sent} == own.keys()
        for key, tensor in sent.items():
            assert torch.equal(tensor, files[key]), key


def logits_of_this_rank(folder) -> tuple[torch.Tensor, torch.Tensor]:
    """And at which tokens they are; -1 is slime's padding."""
    accelerator._ACCELERATOR = CPU
    with parallel(cp=2), torch.no_grad():
        becomes = f"{LINEAR_LAYERS[1]} --context-parallel-size 2"
        model = built(arguments("Qwen3.5", folder, LINEAR_LAYERS[0], becomes))
        places = torch.arange(sum(LENGTHS)).split(LENGTHS)
        mine = torch.cat([slice_with_cp(document, -1) for document in places])
        return logits(model, batch())[: len(mine)], mine


def test_two_context_parallel_ranks_have_the_logits_of_one(pools, tmp_path):
    published("Qwen3.5", tmp_path, num_hidden_layers=3)
    start_one_process()
    accelerator._ACCELERATOR = CPU
    with torch.no_grad():
        model = built(arguments("Qwen3.5", tmp_path, *LINEAR_LAYERS))
        expected = logits(model, batch())
    end_one_process()
    for found, places in pools(2).run(logits_of_this_rank, tmp_path):
        real = places >= 0
        tiny_models.require_logits("two ranks", found[real], expected[places[real]])
