"""The parts of a Gated DeltaNet, from its tensors.

Legend: S seq, B batch, P projection width, C conv channels, W conv taps, G key heads, H value
heads, K key dim, V value dim.
"""

from __future__ import annotations

from torch import Tensor

from ..parts import GatedNorm, Parts
from ..readout.base import Apart
from ..readout.choose import per_head
from ..rules.base import Rule
from .front import GDNFront
from .sizes import HeadSizes


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
        rule: from :func:`.rule.resolve.resolve_rule`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        normalise_qk: scale q and k to unit length.
        allow_neg_eigval: write strengths in (0, 2) instead of (0, 1).
        recompute_qkv: compute q, k and v again in the backward instead of saving them. This saves
            ``2 (G K + H V)`` bytes per token in bf16 and costs one more pass over the projection.
        recompute_rule: compute all inputs of the rule, its output and the inverses of its chunks
            again in the backward. This saves ``2 (G K + 2 H V + 64 H) + 8 H`` bytes per token and
            costs about one more forward of the rule.
        kernels: see :func:`.front_choice.kernels_for`.
        gates: ``[S, B, 2 H]``, beta | alpha, if ``rows`` end with z; not for generation.

    Raises:
        ValueError: rows of other heads, see :meth:`.HeadSizes.check_projection`; a convolution of
            other channels or one that is not contiguous; fp16 operands without ``normalise_qk``,
            unknown ``kernels``.
    """
    sizes.check_projection(rows, gates)
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
    readout, gamma = norm, None
    if isinstance(readout, GatedNorm):
        gamma, eps, zero_centered, activation = readout
        gate = sizes.layout.gate_columns
        readout = per_head(gate, eps, zero_centered, front.triton, activation)
    of_front = conv_weight, conv_bias, A_log, dt_bias
    if gates is not None:
        of_front = *of_front, gates.contiguous()
    return Parts(front, rule, readout, (*of_front, gamma), recompute_rule)
