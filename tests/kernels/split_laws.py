"""Run on two ranks: the mixer over pieces of sequences, by the kernels and by their twins."""

import torch
import torch.distributed as dist

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import Chunkwise, local_indices
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.parts import GatedNorm
from tests.gdn_mixer import gated_delta_mixer, gdn_dims
from tests.ops.delta_rule.states import InHalf, documents_of

from .conftest import INTERPRETED, _numpy_scalars_as_indices

DIMS = gdn_dims(8, 1, 2, 16, 8)


def kernels_equal_their_twins_over_pieces(layout, lengths, dtype, half_operands=False):
    """Relative error against fp64 of everything the mixer gives: (kernels, twins)."""
    if INTERPRETED and not hasattr(_numpy_scalars_as_indices, "done"):
        _numpy_scalars_as_indices()
        _numpy_scalars_as_indices.done = True
    group, rank = dist.group.WORLD, dist.get_rank()
    layout = SequenceLayout.parse(layout)
    state = DIMS.heads.state
    scheme = Chunkwise(DIMS.layout, state, DIMS.conv_kernel_dim, group, layout)
    tokens, rows = (20, 2) if lengths is None else (sum(lengths), 1)
    documents = documents_of(lengths)
    held = local_indices(lengths or (tokens,), group.size(), rank, layout)
    torch.manual_seed(0)
    sizes = DIMS.heads
    proj = torch.randn(tokens, rows, sizes.width).to(dtype)[held]
    weights = [
        torch.randn(sizes.conv_width, 1, 4).to(dtype) * 0.5,
        torch.randn(sizes.conv_width).to(dtype),
        torch.randn(2),
        torch.randn(2),
        1 + 0.3 * torch.randn(8).to(dtype),
    ]
    neighbours = scheme.passage(documents, tokens, rows, proj).neighbours
    weight = torch.randn(tokens, rows, sizes.z_column - 2 * 16)[held]

    def run(kernels: str, wide: bool) -> dict[str, torch.Tensor]:
        leaves = [(x.double() if wide else x.clone()).requires_grad_() for x in (proj, *weights)]
        *tensors, gamma = leaves
        rule = HalfOperands(InHalf()) if half_operands and not wide else PlainRule()
        mixed = gated_delta_mixer(
            *tensors, sizes, rule=rule, norm=GatedNorm(gamma),
            neighbours=neighbours, kernels=kernels,
        )  # fmt: skip
        grads = torch.autograd.grad((mixed.double() * weight.double()).sum(), leaves)
        names = ("d_proj", "d_weight", "d_bias", "dA_log", "d_dt_bias", "d_gamma")
        return {"mixed": mixed.detach(), **dict(zip(names, grads, strict=True))}

    exact, twins, kernels = run("torch", True), run("torch", False), run("triton", False)

    def error(got: torch.Tensor, true: torch.Tensor) -> float:
        return ((got.double() - true).norm() / true.norm()).item()

    return {
        name: (error(kernels[name], true), error(twins[name], true)) for name, true in exact.items()
    }
