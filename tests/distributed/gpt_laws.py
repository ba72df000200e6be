"""Run on every rank: a GPTModel of Gated DeltaNet layers, packed and recomputed; batch cutters."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.specs import gpt_block_spec
from tests.distributed.layer_laws import thd
from tests.parallel import VOCABULARY, model_config, parallel

LENGTHS = (8, 24, 16)
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def gpt_config(layers: tuple[int, ...], **changes):
    """Of a model whose layers of 1 are recurrent."""
    ours = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [*layers]}
    swiglu = {"gated_linear_unit": True, "add_bias_linear": False, "transformer_impl": "local"}
    settings = {"num_query_groups": 2, **ours, **swiglu, **changes}
    return model_config("G" * len(layers), **settings)


def build_model(cp: int, recompute: bool, layers=(1, 1), positions="none", **options) -> GPTModel:
    """In fp64, of the same weights whatever the number of ranks."""
    again = FULL_RECOMPUTE if recompute else {}
    config = gpt_config(layers, context_parallel_size=cp, cp_comm_type="p2p", **again)
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": 64}
    sizes |= {"position_embedding_type": positions}
    return GPTModel(config, gpt_block_spec(config, **options), **sizes).double()


def summed_gradients(model, of: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every parameter, and more, summed over the context-parallel ranks."""
    of.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()} | more
    for value in found.values():
        dist.all_reduce(value, group=parallel_state.get_context_parallel_group())
    return found


def packed_step(cp: int = 1, recompute: bool = False, **options) -> dict[str, torch.Tensor]:
    """Loss (torch's, in fp64) of one packed row and every gradient, summed over the ranks."""
    with parallel(cp=cp):
        model = build_model(cp, recompute, **options)
        rank, forwards = parallel_state.get_context_parallel_rank(), []
        layer = model.decoder.layers[0].self_attention
        layer.register_forward_pre_hook(lambda *_: forwards.append(1))
        torch.manual_seed(11)
        tokens = torch.randint(0, VOCABULARY, (1, sum(LENGTHS) + 1))
        held = local_indices(LENGTHS, cp, rank)
        logits = model(tokens[:, :-1][:, held], held[None], None, packed_seq_params=thd(LENGTHS))
        loss = F.cross_entropy(logits[0], tokens[0, 1:][held], reduction="sum")
        found = summed_gradients(model, loss, loss=loss.detach())
        assert len(forwards) == 1 + recompute
        return found
