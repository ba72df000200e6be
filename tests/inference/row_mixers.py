"""Small mixers between their projections, and how laws feed them.

Legend: S seq, B batch, P projection width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_gdn.inference import RowMixer, gdn_rows, mamba2_rows
from megatron_gdn.mamba2_dims import Mamba2Dims
from megatron_gdn.ops.aligned import AlignedRule
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front.mamba2 import Mamba2Front
from megatron_gdn.ops.gated_norm.grouped import gate_then_norm
from megatron_gdn.ops.head_sizes import HeadSizes
from megatron_gdn.ops.layout import Layout
from megatron_gdn.ops.mixer import GatedNorm, gated_delta_mixer, mix
from megatron_gdn.ops.neighbours import Neighbours
from megatron_gdn.ops.rule import Rule
from megatron_gdn.ops.ssd.plain import PlainSSD

SIZES = HeadSizes(2, 4, 8, 6)
MAMBA = Mamba2Dims(
    hidden_size=1, num_heads=4, num_groups=2, head_dim=6, state_dim=5, conv_kernel_dim=4
).layout
LIMIT = (0.05, 1.5)
TAPS = 4


def documents_of(lengths) -> Documents:
    return Documents(tuple(torch.tensor([0, *lengths]).cumsum(0).tolist()), torch.device("cpu"))


def _draw(generator, *shape, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make_parameters(dtype=torch.float32, bias=True):
    draw = partial(_draw, torch.Generator().manual_seed(0))
    return {
        "conv_weight": draw(SIZES.conv_width, 1, TAPS, dtype=dtype) * 0.5,
        "conv_bias": draw(SIZES.conv_width, dtype=dtype) * 0.1 if bias else None,
        "A_log": draw(SIZES.value_heads),
        "dt_bias": draw(SIZES.value_heads),
    }, GatedNorm(1 + 0.3 * draw(SIZES.value_dim, dtype=dtype), 1e-6)


def _gdn(rows: torch.Tensor, rule: Rule) -> RowMixer:
    parameters, norm = make_parameters(rows.dtype)
    return gdn_rows(rows, **parameters, sizes=SIZES, rule=rule, norm=norm)


def _train_gdn(rows: torch.Tensor, rule: Rule, documents: Documents | None) -> Any:
    parameters, norm = make_parameters(rows.dtype)
    return gated_delta_mixer(
        rows, **parameters, sizes=SIZES, rule=rule, norm=norm, documents=documents
    )


def _mamba2_parameters(dtype) -> tuple[tuple[torch.Tensor, ...], GatedNorm]:
    draw, heads = partial(_draw, torch.Generator().manual_seed(0)), MAMBA.heads("head")
    channels, inner = MAMBA.conv_width, MAMBA.widths[0]
    parameters = (
        draw(channels, 1, TAPS, dtype=dtype) * 0.5, draw(channels, dtype=dtype) * 0.1,
        draw(heads), draw(heads), draw(heads),
    )  # fmt: skip
    return parameters, GatedNorm(1 + 0.3 * draw(inner, dtype=dtype), 1e-5)


def _mamba2(rows: torch.Tensor, rule: Rule) -> RowMixer:
    parameters, norm = _mamba2_parameters(rows.dtype)
    return mamba2_rows(rows, *parameters, MAMBA, rule=rule, norm=norm, dt_limit=LIMIT)


def _train_mamba2(rows: torch.Tensor, rule: Rule, documents: Documents | None) -> Any:
    parameters, norm = _mamba2_parameters(rows.dtype)
    return mix(
        rows, parameters, front=Mamba2Front(MAMBA, LIMIT), rule=rule, norm=norm,
        norm_kernels=gate_then_norm(MAMBA.heads("group"), False),
        neighbours=Neighbours(documents),
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A mixer that laws are held to, in plain torch."""

    name: str
    layout: Layout
    plain: Rule
    make: Callable[[torch.Tensor, Rule], RowMixer] = field(repr=False)
    train: Callable[[torch.Tensor, Rule, Documents | None], Any] = field(repr=False)

    def rows(self, S: int, B: int = 1, dtype=torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(S * 7 + B)
        return torch.randn(S, B, self.layout.width, generator=generator).to(dtype)

    def _rule(self, aligned: bool) -> Rule:
        return AlignedRule(self.plain) if aligned else self.plain

    def mixer(self, dtype=torch.float32, aligned=False) -> RowMixer:
        return self.make(self.rows(1, 1, dtype), self._rule(aligned))

    def trained(self, rows: torch.Tensor, lengths=None, aligned=False) -> torch.Tensor:
        """What the training path gives for whole sequences."""
        documents = None if lengths is None else documents_of(lengths)
        return self.train(rows, self._rule(aligned), documents)


GDN = Kind("gdn", SIZES.layout, PlainRule(), _gdn, _train_gdn)
MAMBA2 = Kind("mamba2", MAMBA, PlainSSD(), _mamba2, _train_mamba2)
KINDS = (GDN, MAMBA2)
