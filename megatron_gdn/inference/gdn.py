"""The Gated DeltaNet as a :class:`..ops.generation.step.RowMixer`.

Legend: N sequences, P projection width, C conv channels, W conv taps, H value heads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..ops.aligned import AlignedReadout
from ..ops.delta_rule.step import RecurrentRule
from ..ops.front.gdn_front import GDNFront
from ..ops.generation.carry import Carry
from ..ops.generation.step import RowMixer
from ..ops.head_sizes import HeadSizes
from ..ops.mixer import GatedNorm
from ..ops.readout.base import Apart, Readout
from ..ops.readout.per_head import per_head
from ..ops.rule import Rule


def gdn_rows(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    rule: Rule,
    norm: GatedNorm | tuple[Readout | Apart, Tensor | None],
    normalise_qk: bool = True,
    kernels: str = "auto",
) -> RowMixer:
    """The :class:`RowMixer` of a Gated DeltaNet.

    Args:
        proj: rows as they will come; device and dtype are read from it, and its width is checked.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        rule: of prefill, from :func:`megatron_gdn.ops.resolve_rule`.
        norm: the gated output norm: its numbers, or a readout and its gamma.
        normalise_qk, kernels: as in :func:`megatron_gdn.ops.mixer.gated_delta_mixer`.

    Raises:
        ValueError: a projection whose rows are not these heads.
    """
    sizes.check_projection(proj)
    taps, aligned = conv_weight.shape[-1], getattr(rule, "in_steps", False)
    front = GDNFront.of(proj, taps, sizes, rule, normalise_qk=normalise_qk, kernels=kernels)
    parameters = conv_weight, conv_bias, A_log, dt_bias
    in_slots = partial(_in_slots, parameters, sizes, normalise_qk) if front.triton else None
    if isinstance(norm, GatedNorm):
        gamma, eps, zero_centered = norm
        norm = per_head(sizes.layout.gate_columns, eps, zero_centered, front.triton), gamma
    readout, gamma = norm
    if aligned and not isinstance(readout, Apart):
        readout = AlignedReadout(readout)
    return RowMixer(
        front=front,
        rule=rule,
        parameters=parameters,
        state=sizes.state,
        finish=lambda o, rows: readout.forward(o, rows, gamma),
        step_rule=RecurrentRule(),
        # A token's q, k, v and o are few: they stay as wide as the state.
        step_front=GDNFront(
            sizes, front.kernels, normalise_qk, torch.promote_types(proj.dtype, torch.float32)
        ),
        aligned=aligned,
        in_slots=in_slots,
    )


def _in_slots(
    parameters: tuple[Tensor | None, ...],
    sizes: HeadSizes,
    normalise_qk: bool,
    rows: Tensor,
    memory: Carry,
    slots: Tensor,
) -> Tensor:
    from ..ops.front.step import step_slots

    return step_slots(rows, *parameters, *memory, slots, sizes, normalise_qk=normalise_qk)
