"""The Gated DeltaNet as a :class:`.step.RowMixer`.

Legend: N sequences, P projection width, C conv channels, W conv taps, H value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..ops.aligned import AlignedNorm
from ..ops.delta_rule.step import RecurrentRule
from ..ops.front.gdn_front import GDNFront, kernels_for
from ..ops.gated_norm import norm_torch
from ..ops.head_sizes import HeadSizes
from ..ops.mixer import GatedNorm
from ..ops.rule import Rule
from .carry import Carry
from .step import RowMixer


def gdn_rows(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    rule: Rule,
    norm: GatedNorm | Callable[[Tensor, Tensor], Tensor],
    normalise_qk: bool = True,
    kernels: str = "auto",
) -> RowMixer:
    """The :class:`RowMixer` of a Gated DeltaNet.

    Args:
        proj: rows as they will come; device and dtype are read from it, and its width is checked.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        rule: of prefill, from :func:`megatron_gdn.ops.resolve_rule`.
        norm: the gated output norm: its numbers, or a function of o and the rows as in
            :attr:`RowMixer.finish`.
        normalise_qk, kernels: as in :func:`megatron_gdn.ops.mixer.gated_delta_mixer`.

    Raises:
        ValueError: a projection whose rows are not these heads.
    """
    sizes.check_projection(proj)
    front_kernels, norm_kernels = kernels_for(proj, conv_weight.shape[-1], kernels)
    aligned = getattr(rule, "in_steps", False)
    if aligned:
        norm_kernels = AlignedNorm(norm_kernels)
    parameters = conv_weight, conv_bias, A_log, dt_bias
    in_slots = None
    if front_kernels.__name__.endswith(".gdn"):  # Triton's
        in_slots = partial(_in_slots, parameters, sizes, normalise_qk)
    if isinstance(norm, GatedNorm):
        norm = partial(_gated_norm, norm, norm_kernels, sizes.layout.columns("z"))
    return RowMixer(
        front=GDNFront(
            sizes, front_kernels, normalise_qk, rule.operand_dtype, rule.batch_invariant
        ),
        rule=rule,
        parameters=parameters,
        state=sizes.state,
        finish=norm,
        step_rule=RecurrentRule(),
        # A token's q, k, v and o are few: they stay as wide as the state.
        step_front=GDNFront(
            sizes, front_kernels, normalise_qk, torch.promote_types(proj.dtype, torch.float32)
        ),
        aligned=aligned,
        in_slots=in_slots,
    )


def _gated_norm(norm: GatedNorm, kernels, z: slice, o: Tensor, proj: Tensor) -> Tensor:
    if o.shape[1] == 0 and kernels is not norm_torch:
        return proj.new_empty(*proj.shape[:2], z.stop - z.start)
    return kernels.gated_norm_forward(
        o, proj, norm.gamma, z, eps=norm.eps, zero_centered=norm.zero_centered
    )


def _in_slots(
    parameters: tuple[Tensor, Tensor | None, Tensor, Tensor],
    sizes: HeadSizes,
    normalise_qk: bool,
    rows: Tensor,
    memory: Carry,
    slots: Tensor,
) -> Tensor:
    from ..ops.front.step import step_slots

    return step_slots(rows, *parameters, *memory, slots, sizes, normalise_qk=normalise_qk)
