"""The front of a Gated DeltaNet: conv + SiLU, l2norm and gates in one launch each way.

    q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
    g    = -exp(A_log) * softplus(alpha + dt_bias);  beta = sigmoid(b)

With ``allow_neg_eigval`` beta is twice that. :mod:`..ops.delta_rule.front_choice` chooses among the
kernels and their plain twins.

Legend: S seq, B batch, P projection width, C conv channels, W conv taps, G key heads, H value
heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ops.delta_rule.base import HeadSizes, RuleGrads, RuleInputs, require_even_groups
from ..ops.delta_rule.front_choice import is_triton, kernels_for
from ..ops.documents import Documents
from ..ops.elementwise import decay_and_write_gates, largest_beta
from ..ops.front.base import Parameters, StepForm
from ..ops.front.history import History
from ..ops.layout import Layout
from ..ops.parts import GatedNorm, Parts, readout_of
from ..ops.readout.base import Apart
from ..ops.rules.base import Rule
from ..ops.state_maps.state_map import StateShape


@dataclass(frozen=True, eq=False)
class GDNFront:
    """Parameters: conv weight ``[C, 1, W]``, conv bias ``[C]`` or None, A_log and dt_bias ``[H]``;
    and the gates ``[S, B, 2 H]``, beta | alpha, if the rows do not hold them.
    """

    sizes: HeadSizes
    kernels: Any  # what :func:`..ops.delta_rule.front_choice.kernels_for` chose
    normalise_qk: bool = True  # scale q and k to unit length
    allow_neg_eigval: bool = False  # write strengths in (0, 2) instead of (0, 1)
    dtype: torch.dtype | None = None  # of q, k and v; None is the projection's
    batch_invariant: bool = False  # the bits of a packed document do not depend on its place
    again: tuple[str, ...] = ("q",)  # computed again in the backward; q costs the least per byte

    names = RuleInputs._fields
    convolved = ("q", "k", "v")

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        device: str,
        dtype: torch.dtype,
        taps: int,
        sizes: HeadSizes,
        operands: torch.dtype | None = None,
        batch_invariant: bool = False,
        normalise_qk: bool = True,
        allow_neg_eigval: bool = False,
        recompute_qkv: bool = False,
        kernels: str = "auto",
        aligned: bool = False,
    ) -> GDNFront:
        """The front of rows in ``dtype`` for a rule with this ``operand_dtype`` and marks."""
        if operands is not None and not normalise_qk:
            raise ValueError(
                f"this rule takes q and k in {operands}, whose range they may leave without unit "
                f"length; pass normalise_qk=False to resolve_rule too, or choose operands='bf16'."
            )
        return GDNFront(
            sizes, kernels_for(device, dtype, taps, sizes, kernels, aligned), normalise_qk,
            allow_neg_eigval, operands, batch_invariant,
            ("q", "k", "v") if recompute_qkv else ("q",),
        )  # fmt: skip

    @property
    def layout(self) -> Layout:
        return self.sizes.layout

    @property
    def state(self) -> StateShape:
        return self.sizes.state

    @cached_property
    def triton(self) -> bool:
        return is_triton(self.kernels)

    @cached_property
    def step(self) -> StepForm:
        return StepForm(
            ("query", "key", "value"), self._gates, self._kernel_gates if self.triton else None,
            self.sizes.key_dim**-0.5, self.normalise_qk,
        )  # fmt: skip

    def _gates(self, rows: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        raw = rows.transpose(0, 1)[..., self.sizes.beta_column :]
        b, alpha = raw.split(self.sizes.value_heads, dim=-1)
        signs = {"allow_neg_eigval": self.allow_neg_eigval}
        return decay_and_write_gates(alpha, b, A_log, dt_bias, **signs)

    def _kernel_gates(self) -> tuple[Any, tuple[int, int], tuple[float, float]]:
        from ..ops.generation.step_kernels import decay_and_write_gates

        beta = self.sizes.beta_column
        numbers = (0.0, largest_beta(self.allow_neg_eigval))
        return decay_and_write_gates, (beta, beta + self.sizes.value_heads), numbers

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> RuleInputs:
        weight, bias, A_log, dt_bias, *apart = parameters
        return self.kernels.prepare_forward(
            proj, weight, bias, A_log, dt_bias, self.sizes, gates=apart[0] if apart else None,
            documents=documents, normalise_qk=self.normalise_qk,
            allow_neg_eigval=self.allow_neg_eigval, dtype=self.dtype,
            batch_invariant=self.batch_invariant, parts="qkvg" if only is None else "".join(only),
            history=history,
        )  # fmt: skip

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: RuleGrads,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        *of_inputs, factor = grads
        weight, bias, A_log, dt_bias, *apart = parameters
        gates = apart[0] if apart else None
        d_gates = None if gates is None else torch.empty_like(gates)
        made = self.kernels.prepare_backward(
            proj, weight, bias, A_log, dt_bias, self.sizes, *of_inputs, d_proj,
            documents=documents, factor=factor, normalise_qk=self.normalise_qk,
            allow_neg_eigval=self.allow_neg_eigval, batch_invariant=self.batch_invariant,
            gates=gates, d_gates=d_gates, history=history,
        )  # fmt: skip
        return made if d_gates is None else (*made, d_gates)


def gdn_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    rule: Rule,
    norm: GatedNorm | Apart,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    recompute_qkv: bool = False,
    recompute_rule: bool = False,
    kernels: str = "auto",
    gates: Tensor | None = None,
) -> Parts:
    """The :class:`Parts` of a Gated DeltaNet.

    Args:
        rows: ``[S, B, P]``, query | key | value | z | beta | alpha. Their device and dtype choose
            the kernels.
        conv_weight, conv_bias: ``[C, 1, W]`` or ``[C, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        rule: from :func:`.rule.resolve_rule`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        normalise_qk: scale q and k to unit length.
        allow_neg_eigval: write strengths in (0, 2) instead of (0, 1).
        recompute_qkv: compute q, k and v again in the backward instead of saving them. This saves
            ``2 (G K + H V)`` bytes per token in bf16 and costs one more pass over the projection.
        recompute_rule: compute all inputs of the rule, its output and the inverses of its chunks
            again in the backward. This saves ``2 (G K + 2 H V + 64 H) + 8 H`` bytes per token and
            costs about one more forward of the rule.
        kernels: see :func:`..ops.delta_rule.front_choice.kernels_for`.
        gates: ``[S, B, 2 H]``, beta | alpha, if ``rows`` end with z; not for generation.

    Raises:
        ValueError: rows or gates of other heads or strides, a convolution of other channels or one
            that is not contiguous; fp16 operands without ``normalise_qk``, unknown ``kernels``.
    """
    require_even_groups(sizes.key_heads, sizes.value_heads)
    width = sizes.width if gates is None else sizes.beta_column
    if rows.dim() != 3 or rows.shape[2] != width:
        raise ValueError(
            f"the projection must be [S, B, {width}] for {sizes.key_heads} key heads of "
            f"{sizes.key_dim} and {sizes.value_heads} value heads of {sizes.value_dim}, got "
            f"{tuple(rows.shape)}."
        )
    if rows.stride(2) != 1:
        raise ValueError(
            f"the columns of the projection must be adjacent in memory, got strides "
            f"{rows.stride()}; call .contiguous() on it first."
        )
    if gates is not None and gates.shape != (*rows.shape[:2], 2 * sizes.value_heads):
        raise ValueError(
            f"the gates must be {[*rows.shape[:2], 2 * sizes.value_heads]} beside rows "
            f"{tuple(rows.shape)}, got {tuple(gates.shape)}."
        )
    if conv_weight.shape[0] != sizes.conv_width or not conv_weight.is_contiguous():
        raise ValueError(
            f"conv_weight must be contiguous [{sizes.conv_width}, 1, W] for these heads, got "
            f"shape {tuple(conv_weight.shape)} and strides {conv_weight.stride()}."
        )
    front = GDNFront.of(
        rows.device.type, rows.dtype, conv_weight.shape[-1], sizes, rule.operand_dtype,
        rule.batch_invariant, normalise_qk, allow_neg_eigval, recompute_qkv, kernels,
        getattr(rule, "aligned", False),
    )  # fmt: skip
    readout, gamma = readout_of(norm, sizes.layout.gate_columns, front.triton)
    of_front = conv_weight, conv_bias, A_log, dt_bias
    if gates is not None:
        of_front = *of_front, gates.contiguous()
    return Parts(front, rule, readout, (*of_front, gamma), recompute_rule)
