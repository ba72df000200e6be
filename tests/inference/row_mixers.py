"""A small mixer between its projections, and the cuts of sequences that laws are tried on.

Legend: S seq, B batch, P projection width.
"""

import torch

from megatron_gdn.inference import RowMixer, gdn_rows
from megatron_gdn.ops.delta_rule.resolve import resolve_rule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.head_sizes import HeadSizes
from megatron_gdn.ops.mixer import GatedNorm, gated_delta_mixer

SIZES = HeadSizes(2, 4, 8, 6)
TAPS = 4


def make_parameters(dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "conv_weight": draw(SIZES.conv_width, 1, TAPS) * 0.5,
        "conv_bias": draw(SIZES.conv_width) * 0.1 if bias else None,
        "A_log": draw(SIZES.value_heads, dtype=torch.float32),
        "dt_bias": draw(SIZES.value_heads, dtype=torch.float32),
    }, GatedNorm(1 + 0.3 * draw(SIZES.value_dim), 1e-6)


def draw_rows(S: int, B: int = 1, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(S * 7 + B)
    return torch.randn(S, B, SIZES.width, generator=generator).to(dtype)


def rule_for(dtype):
    return resolve_rule("reference", device="cpu", dtype=dtype, sizes=SIZES).rule


def make_mixer(dtype=torch.float32) -> RowMixer:
    parameters, norm = make_parameters(dtype)
    return gdn_rows(
        draw_rows(1, 1, dtype), **parameters, sizes=SIZES, rule=rule_for(dtype), norm=norm
    )


def trained(rows: torch.Tensor, lengths=None) -> torch.Tensor:
    """What the training path gives for whole sequences."""
    parameters, norm = make_parameters(rows.dtype)
    documents = None
    if lengths is not None:
        documents = documents_of(lengths)
    with torch.no_grad():
        return gated_delta_mixer(
            rows, **parameters, sizes=SIZES, rule=rule_for(rows.dtype), norm=norm,
            documents=documents,
        )  # fmt: skip


def documents_of(lengths) -> Documents:
    return Documents(tuple(torch.tensor([0, *lengths]).cumsum(0).tolist()), torch.device("cpu"))
