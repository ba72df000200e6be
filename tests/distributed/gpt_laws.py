"""Run on every rank: a GPTModel of Gated DeltaNet layers, packed and recomputed; batch
cutters."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_gdn.specs import gpt_block_spec
from tests.parallel import VOCABULARY, model_config

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def gpt_config(layers: tuple[int, ...], **changes):
    """Of a model whose layers of 1 are recurrent."""
    ours = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [*layers],
    }
    swiglu = {
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "transformer_impl": "local",
    }
    settings = {"num_query_groups": 2, **ours, **swiglu, **changes}
    return model_config("G" * len(layers), **settings)


def build_model(
    cp: int, recompute: bool, layers=(1, 1), positions="none", **options
) -> GPTModel:
    """In fp64, of the same weights whatever the number of ranks."""
    again = FULL_RECOMPUTE if recompute else {}
    config = gpt_config(layers, context_parallel_size=cp, cp_comm_type="p2p", **again)
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": 64}
    sizes |= {"position_embedding_type": positions}
    return GPTModel(config, gpt_block_spec(config, **options), **sizes).double()


def summed_gradients(
    model, of: torch.Tensor, **more: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Of every parameter, and more, summed over the context-parallel ranks."""
    of.backward()
    found = {
        name: parameter.grad for name, parameter in model.named_parameters()
    } | more
    for value in found.values():
        dist.all_reduce(value, group=parallel_state.get_context_parallel_group())
    return found
