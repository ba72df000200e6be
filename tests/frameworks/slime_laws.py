"""slime's own Python builds, loads, packs for and converts our layer, by `--spec`
alone."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.layers import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.training.arguments import parse_args
from safetensors.torch import load_file, save_file
from slime.backends.megatron_utils import hf_to_megatron, megatron_to_hf
from slime.backends.megatron_utils.arguments import set_default_megatron_args
from slime.backends.megatron_utils.data import DataIterator, get_batch
from slime.backends.megatron_utils.model_provider import get_model_provider_func
from slime.utils import accelerator
from torch import nn
from torch.nn.functional import cross_entropy

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process
from megatron_gdn.hf.safetensors_files import SafetensorsFolder
from tests.frameworks import tiny_models
from tests.frameworks.tiny_models import (
    require_exported,
    require_falling,
    require_logits,
)

for name, names in {
    "sglang.srt.utils.patch_torch": {"monkey_patch_torch_reductions": lambda: None},
    "sglang.srt.utils": {"MultiprocessingSerializer": None},
    "sglang.srt.weight_sync.tensor_bucket": {"FlattenedTensorBucket": None},
}.items():
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path  # noqa: E402
from slime.backends.megatron_utils.update_weight.common import (  # noqa: E402
    named_params_and_buffers,
)
from slime.utils.distributed_utils import init_gloo_group, set_gloo_group  # noqa: E402

LENGTHS = [10, 7, 5]
VOCABULARY = 128  # Megatron pads it to a multiple of this
SPECS = {
    "Qwen3-Next": "get_qwen3_next_spec",
    "Qwen3.5": "get_qwen3_5_spec",
    "Qwen3.5 MoE": "get_qwen3_5_spec",
}
# As in slime's scripts/models, with the sizes above.
FLAGS = """
    --disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 4
    --num-query-groups 2 --kv-channels 16 --num-layers 4 --hidden-size 32 --ffn-hidden-size 48
    --normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope --norm-epsilon 1e-6
    --rotary-percent 0.25 --rotary-base 10000 --swiglu --untie-embeddings-and-output-weights
    --vocab-size 128 --attention-output-gate --micro-batch-size 1
    --attention-dropout 0 --hidden-dropout 0
"""
MOE_FLAGS = """
    --num-experts 4 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16
    --moe-router-score-function softmax --moe-router-topk 2 --moe-layer-freq [1,1,1,1]
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
    --moe-aux-loss-coeff 0 --moe-shared-expert-gate
"""
WITHOUT_GPU = {
    "moe_token_dispatcher_type": "allgather",
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "use_cpu_initialization": True,
}

CPU = SimpleNamespace(
    device=lambda index=None: torch.device("cpu"),
    current_device=lambda: "cpu",
    synchronize=lambda device=None: None,
    ipc_collect=lambda: None,
    empty_cache=lambda: None,
)


class Wrapped(nn.Module):
    """Around a model, as DistributedDataParallel is: its parameters are
    ``module.``..."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    start_one_process()
    set_gloo_group(None)  # that of the test before is gone
    init_gloo_group()
    monkeypatch.setattr(accelerator, "_ACCELERATOR", CPU)
    yield
    end_one_process()


def published(name: str, folder, dtype: torch.dtype = torch.float32, **changes):
    """Without images, which slime's text model leaves alone; in bf16 two tensors stay
    in fp32."""
    model = tiny_models.published(name, folder, dtype, vocab_size=VOCABULARY, **changes)
    file = folder / "model.safetensors"
    saved = {
        key: weight for key, weight in load_file(file).items() if ".visual." not in key
    }
    for key in saved:
        # as in published files
        if key.endswith((".A_log", ".linear_attn.norm.weight")):
            saved[key] = saved[key].float()
        if key.endswith(".A_log") and dtype == torch.bfloat16:
            saved[key] += 1e-4  # no number of bf16
    save_file(saved, file, {"format": "pt"})
    return model


def arguments(name: str, folder, flag: str = "", becomes: str = ""):
    """Of a launch of slime, by the parsers of Megatron and slime."""
    moe = "" if name == "Qwen3.5" else MOE_FLAGS
    flags = f"{FLAGS} {moe} --spec megatron_gdn.frameworks.slime {SPECS[name]}"
    with patch.object(sys, "argv", ["train.py", *flags.replace(flag, becomes).split()]):
        args = parse_args()
    args.hf_checkpoint, args.load = str(folder), str(folder)
    # slime's defaults
    args.model_name = None
    args.update_weight_buffer_size = 512 * 1024**2
    args = set_default_megatron_args(args)
    for field, value in WITHOUT_GPU.items():
        assert hasattr(args, field), field
        setattr(args, field, value)
    return args


def built(args, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """slime's model for these arguments, with the weights of ``args.load``, by its own
    loader."""
    args.params_dtype = dtype
    args.bf16 = dtype == torch.bfloat16
    model = get_model_provider_func(args)()
    for parameter in model.parameters():  # as Megatron's `get_model` does
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    inner = Float16Module(model.config, model) if args.bf16 else Wrapped(model)
    models = [Wrapped(inner)]
    hf_to_megatron.load_hf_weights(args, models, args.load)
    return models


def layers(models) -> list:
    return [each.self_attention for each in models[0].module.module.decoder.layers]


def batch() -> dict:
    """Documents as slime packs them for this rank: end to end, and padding as one
    document more."""
    generator = torch.manual_seed(1)
    tokens = [
        torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS
    ]
    rollout = {
        "tokens": tokens,
        "total_lengths": LENGTHS,
        "response_lengths": [3] * len(LENGTHS),
        "loss_masks": [torch.ones(3) for _ in LENGTHS],
    }
    keys = [*rollout, "multimodal_train_inputs"]
    return get_batch(
        DataIterator(rollout, [list(range(len(LENGTHS)))]), keys, pad_multiplier=32
    )


def logits(models, given: dict) -> torch.Tensor:
    """As slime's forward step calls the model: ``[T, vocabulary]``."""
    return models[0](
        input_ids=given["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=given["packed_seq_params"],
    )[0]


@pytest.mark.parametrize("name", SPECS)
def test_the_logits_of_packed_documents_are_transformers_of_each(name, tmp_path):
    theirs = published(name, tmp_path)
    ours = built(arguments(name, tmp_path))
    found = [isinstance(each, megatron_gdn.GatedDeltaNet) for each in layers(ours)]
    assert found == [True] * 3 + [False]
    given = batch()
    with torch.no_grad():
        expected = torch.cat(
            [theirs(ids[None]).logits[0] for ids in given["unconcat_tokens"]]
        )
        require_logits(name, logits(ours, given)[: sum(LENGTHS)], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_what_slime_saves_is_what_it_loaded(name, dtype, tmp_path):
    published(name, tmp_path / "published", dtype)
    args = arguments(name, tmp_path / "published")
    model = built(args, dtype)
    gates = layers(model)[0]
    assert gates.A_log.dtype == gates.dt_bias.dtype == torch.float32
    save_hf_model_to_path(args, tmp_path / "saved", model)
    saved = SafetensorsFolder(tmp_path / "saved")
    found = ((key, saved.read(key)) for key in saved.specs)
    require_exported(found, tmp_path / "published", one_by_one=True)


@pytest.mark.parametrize("name", SPECS)
def test_the_engine_gets_what_slimes_own_layer_would_send(name, tmp_path):
    published(name, tmp_path, torch.bfloat16)
    args = arguments(name, tmp_path)
    model = built(args, torch.bfloat16)
    model_name = tiny_models.MODELS[name][0]
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    sent = {}
    for key, parameter in named_params_and_buffers(args, model):
        sent |= megatron_to_hf.convert_to_hf(args, model_name, key, parameter.data, fp8)
    linear_attn = {
        key: tensor for key, tensor in sent.items() if ".linear_attn." in key
    }
    expected = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        layer, found, own = key.partition(".linear_attn.")
        if found:
            number = layer.rpartition(".")[2]
            theirs = f"module.module.decoder.layers.{number}.self_attention.linear_attn.{own}"
            expected |= megatron_to_hf.convert_to_hf(
                args, model_name, theirs, tensor, fp8
            )
    assert linear_attn.keys() == expected.keys()
    assert name == "Qwen3-Next" or any(
        key.endswith("in_proj_qkv.weight_scale") for key in expected
    )
    for key, tensor in expected.items():
        assert linear_attn[key].dtype == tensor.dtype, key
        assert torch.equal(linear_attn[key].float(), tensor.float()), key


def test_megatrons_checkpoint_of_it_is_loaded_again(tmp_path):
    """Dense: the stand-in's experts have no extra state, which Megatron's checkpoint
    stores."""
    published("Qwen3.5", tmp_path / "published")
    args = arguments("Qwen3.5", tmp_path / "published")
    saved, loaded = (built(args)[0].module.module for _ in range(2))
    (tmp_path / "checkpoint").mkdir()
    dist_checkpointing.save(saved.sharded_state_dict(), str(tmp_path / "checkpoint"))
    for parameter in loaded.parameters():
        parameter.data.zero_()
    wanted = loaded.sharded_state_dict()
    assert "decoder.layers.0.self_attention.A_log" in {
        each.key for each in wanted.values()
    }
    loaded.load_state_dict(
        dist_checkpointing.load(wanted, str(tmp_path / "checkpoint"))
    )
    for (key, expected), parameter in zip(
        saved.named_parameters(), loaded.parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), key


def test_it_trains(tmp_path):
    published("Qwen3.5", tmp_path)
    model = built(arguments("Qwen3.5", tmp_path))
    given = batch()
    ids = given["tokens"][0]
    require_falling(
        lambda: cross_entropy(logits(model, given)[:-1], ids[1:]), model[0].parameters()
    )


def test_norms_that_slime_would_copy_wrongly_are_refused(tmp_path):
    published("Qwen3.5", tmp_path)
    with pytest.raises(ValueError, match="Add --apply-layernorm-1p"):
        built(arguments("Qwen3.5", tmp_path, "--apply-layernorm-1p"))
