"""Small mixers between their projections, and how laws feed them.

Legend: S seq, B batch, P projection width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_gdn.gdn2.rule import PlainGDN2
from megatron_gdn.gdn2.sizes import gdn2_layout as rows_of_gdn2
from megatron_gdn.gdp.sizes import gdp_layout
from megatron_gdn.inference import (
    Memory,
    RowMixer,
    decode,
    gdn2_rows,
    gdn_rows,
    gdp_rows,
    kda_rows,
    mamba2_rows,
    prefill,
)
from megatron_gdn.kda.sizes import kda_layout
from megatron_gdn.mamba2.rule import PlainSSD
from megatron_gdn.mamba2.sizes import Mamba2Dims
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.layout import Layout
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.rules.base import Bits, Rule
from megatron_gdn.ops.rules.steps import RuleOfSteps
from megatron_gdn.ops.stages import GatedNorm, SequenceContext

DT_LIMIT = (0.05, 1.5)
TAPS = 4


class Parameters(NamedTuple):
    own: tuple[Tensor, ...]  # of the front
    norm: GatedNorm

    def to(self, *where: Any) -> "Parameters":
        gamma, *rest = self.norm
        return Parameters(
            tuple(x.to(*where) for x in self.own), GatedNorm(gamma.to(*where), *rest)
        )


def documents_of(lengths, device="cpu") -> Documents:
    return Documents(
        tuple(torch.tensor([0, *lengths]).cumsum(0).tolist()), torch.device(device)
    )


def _draw(
    layout: Layout, taps: int, gates, gamma: int, eps: float, dtype, activation: str
) -> Parameters:
    """Conv weight and bias, gate parameters of these sizes, and the norm's."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    own = (
        draw(layout.conv_width, 1, taps, dtype=dtype) * 0.5,
        draw(layout.conv_width, dtype=dtype) * 0.1,
        *map(draw, gates),
    )
    return Parameters(
        own, GatedNorm(1 + 0.3 * draw(gamma, dtype=dtype), eps, False, activation)
    )


@dataclass(frozen=True)
class Kind:
    """A mixer that laws are held to."""

    name: str
    layout: Layout
    plain: Rule
    draw: Callable[[torch.dtype], Parameters] = field(repr=False)
    # of rows, parameters, a rule and options
    make: Callable[..., RowMixer] = field(repr=False)

    def rows(self, S: int, B: int = 1, dtype=torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(S * 7 + B)
        return torch.randn(S, B, self.layout.width, generator=generator).to(dtype)

    def rule(self, aligned: bool) -> Rule:
        return type(self.plain)(Bits.ON_GRID if aligned else Bits.FREE)

    def mixer(self, dtype=torch.float32, aligned=False) -> RowMixer:
        return self.make(self.rows(1, 1, dtype), self.draw(dtype), self.rule(aligned))

    def train(
        self, rows: Tensor, parameters: Parameters, rule: Rule, documents
    ) -> Tensor:
        return mix(rows, self.make(rows, parameters, rule), SequenceContext(documents))

    def trained(self, rows: Tensor, lengths=None, aligned=False) -> Tensor:
        """What the training path gives for whole sequences."""
        documents = None if lengths is None else documents_of(lengths)
        return self.train(rows, self.draw(rows.dtype), self.rule(aligned), documents)


def _kind(
    name, plain: Rule, rows_of_mixer, layout, taps, gates, gamma, eps=1e-6, **front
) -> Kind:
    def make(rows, parameters, rule, **options):
        given = {"rule": rule, "norm": parameters.norm, **front, **options}
        return rows_of_mixer(rows, *parameters.own, layout, **given)

    activation = "sigmoid" if name == "kda" else "silu"
    draw = partial(_draw, layout, taps, gates, gamma, eps, activation=activation)
    return Kind(name, layout, plain, draw, make)


def gdn_kind(sizes: HeadSizes, taps: int = TAPS) -> Kind:
    gates = [sizes.value_heads] * 2
    return _kind(
        "gdn", PlainRule(), gdn_rows, sizes.layout, taps, gates, sizes.value_dim
    )


def mamba2_kind(
    heads: int,
    groups: int,
    head_dim: int,
    state_dim: int,
    taps: int = TAPS,
    per_channel_D=False,
) -> Kind:
    layout = Mamba2Dims(
        hidden_size=1,
        num_heads=heads,
        num_groups=groups,
        head_dim=head_dim,
        state_dim=state_dim,
        conv_kernel_dim=taps,
    ).layout
    gates = [heads, heads, heads * (head_dim if per_channel_D else 1)]
    return _kind(
        "mamba2",
        PlainSSD(),
        mamba2_rows,
        layout,
        taps,
        gates,
        heads * head_dim,
        1e-5,
        dt_limit=DT_LIMIT,
    )


def kda_kind(sizes: HeadSizes, taps: int = TAPS) -> Kind:
    gates = [sizes.value_heads, sizes.value_heads * sizes.key_dim]
    return _kind(
        "kda", PlainRule(), kda_rows, kda_layout(sizes), taps, gates, sizes.value_dim
    )


def gdn2_kind(sizes: HeadSizes, taps: int = TAPS) -> Kind:
    gates = [sizes.key_heads, sizes.key_heads * sizes.key_dim]
    return _kind(
        "gdn2",
        PlainGDN2(),
        gdn2_rows,
        rows_of_gdn2(sizes),
        taps,
        gates,
        sizes.value_dim,
    )


def gdp_kind(sizes: HeadSizes, steps: int, taps: int = TAPS) -> Kind:
    class PlainSteps(RuleOfSteps):
        def __init__(self, bits: Bits = Bits.FREE) -> None:
            super().__init__(PlainRule(bits), steps)

    gates = [sizes.value_heads] * 2
    layout = gdp_layout(sizes, steps)
    gamma = sizes.value_heads * sizes.value_dim
    return _kind("gdp", PlainSteps(), gdp_rows, layout, taps, gates, gamma, 1e-5)


GDN = gdn_kind(HeadSizes(2, 4, 8, 6))
MAMBA2 = mamba2_kind(heads=4, groups=2, head_dim=6, state_dim=5)
KDA = kda_kind(HeadSizes(2, 4, 8, 6))
GDN2 = gdn2_kind(HeadSizes(2, 4, 8, 6))
GDP = gdp_kind(HeadSizes(2, 4, 7, 6), 2)
KINDS = (GDN, GDN2, GDP, MAMBA2, KDA)


def empty_memory(mixer: RowMixer, rows: Tensor, sequences: int | None = None) -> Memory:
    """Of sequences that must say that they begin: what it holds is of no meaning."""
    count = rows.shape[1] if sequences is None else sequences
    memory = mixer.memory_shape.zeros(count, rows.dtype, rows.device)
    for x in memory[:2]:
        x.fill_(torch.nan)
    return memory


def prefilled(
    mixer: RowMixer, rows: Tensor, documents: Documents | None = None, **given
):
    """The rows of sequences that begin, and their memory."""
    sequences = None if documents is None else len(documents.lengths)
    memory = empty_memory(mixer, rows, sequences)
    return prefill(rows, mixer, memory, documents, begins=True, **given), memory


def copied(memory: Memory) -> Memory:
    return Memory(memory.history.clone(), memory.state.clone(), memory.slots)


def run_in_parts(mixer: RowMixer, rows: Tensor, stages):
    """Stages are prefilled; those of a negative number of tokens are decoded."""
    mixed = []
    start = 0
    memory = mixer.memory_shape.zeros(rows.shape[1], rows.dtype, rows.device)
    for part in stages:
        piece = rows[start : start + abs(part)]
        if part < 0:
            mixed.append(decode(piece, mixer, memory))
        else:
            mixed.append(prefill(piece, mixer, memory, begins=start == 0))
        start += abs(part)
    assert start == len(rows)
    return torch.cat(mixed), memory
