"""A recurrent mixer as one autograd function: projection rows in, mixed rows out.

    inputs = front(rows)            conv, activation, norms, gates: one kernel over strided rows
    o      = rule(inputs)           the recurrence
    mixed  = RMSNorm(o) * SiLU(z)   one kernel, written as [S, B, H V]

It is one function so that it saves only what the backward reads, and so that every gradient of the
projection is written once, into its columns of one buffer. :class:`.neighbours.Neighbours` gives
the history of the front and the initial state of the rule.

Legend: S seq, B batch, P projection width, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .aligned import AlignedFront, AlignedNorm
from .documents import Documents, require_one_row
from .front.base import Front
from .front.gdn_front import GDNFront, kernels_for
from .front.history import ContinuedFront
from .hand_over import HandOver
from .head_sizes import HeadSizes
from .mixer_function import Call, MixerFunction
from .neighbours import Neighbours
from .no_tokens import mix_no_tokens
from .recompute import RefilledOutput
from .rule import Rule


class GatedNorm(NamedTuple):
    """The output norm: ``RMSNorm(o) * gamma * SiLU(z)``, or ``* (1 + gamma)`` zero-centered."""

    gamma: Tensor  # [V]
    eps: float = 1e-6
    zero_centered: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """How one kind of batch is mixed. Nothing here depends on the tensors of a call.

    Attributes:
        front: projection rows to the rule's inputs.
        rule: the recurrence.
        norm_kernels: :mod:`.readout.per_head_triton` or its plain twin.
        neighbours: boundaries, history and states.
        again: the rule's inputs that the backward computes again instead of saving them.
        heads: with a state.
        z: the columns of the output norm's gate.
    """

    front: Front
    rule: Rule
    norm_kernels: ModuleType
    neighbours: Neighbours
    again: tuple[str, ...]
    heads: int
    z: slice

    @classmethod
    def of(
        cls,
        front: Front,
        rule: Rule,
        norm_kernels: ModuleType,
        neighbours: Neighbours,
        recompute: Sequence[str] = (),
    ) -> Plan:
        """A rule in steps (:mod:`.aligned`) takes the front and the norm with it."""
        if getattr(rule, "in_steps", False):
            front, aligned = AlignedFront(front), AlignedNorm(norm_kernels)
            norm_kernels = cast(ModuleType, aligned)  # it has the two functions that are called
        wanted = {*front.cheap, *recompute}
        again = tuple(name for name in front.names if name in wanted)
        layout = front.layout
        heads, z = layout.state_heads, layout.columns("z")
        return cls(front, rule, norm_kernels, neighbours, again, heads, z)

    @cached_property
    def saved(self) -> tuple[bool, ...]:
        """Of each input of the rule, whether it is saved."""
        reads = self.rule.reads_again
        return tuple(name in reads and name not in self.again for name in self.front.names)

    def mix(
        self,
        rows: Tensor,
        parameters: Sequence[Tensor | None],
        norm: GatedNorm | None,
        refilled: RefilledOutput | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`mix`."""
        if norm is None and refilled is not None:
            raise ValueError("refilled repeats the gated norm, so it needs norm.")
        gamma, eps, zero_centered = (None, None, False) if norm is None else norm
        if not rows.numel():
            # On every rank that shares the sequences, so nobody waits for rows of them.
            return mix_no_tokens(
                rows, gamma, *parameters, z=self.z, heads=self.heads, with_norm=norm is not None
            )
        front, history = self.front, self.neighbours.history
        if history is not None:
            front = ContinuedFront(front, history)
        keep = torch.is_grad_enabled() and _wanted(rows, gamma, *parameters)
        hand_over = HandOver() if keep and norm is not None else None
        call = Call(self, front, eps, zero_centered, keep, refilled, hand_over)
        out = MixerFunction.apply(call, rows, gamma, *parameters)
        return out if hand_over is None else hand_over.behind(out)


def _wanted(*tensors: Tensor | None) -> bool:
    """Whether any of them needs a gradient."""
    return any(x is not None and x.requires_grad for x in tensors)


def mix(
    proj: Tensor,
    parameters: Sequence[Tensor | None],
    *,
    front: Front,
    rule: Rule,
    norm: GatedNorm | None,
    norm_kernels: ModuleType,
    neighbours: Neighbours | None = None,
    recompute: Sequence[str] = (),
    refilled: RefilledOutput | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Everything between in_proj and out_proj, for the heads one rank holds.

    Args:
        proj: ``[S, B, P]`` in the front's layout; any strides of S and B.
        parameters: the front's.
        front: projection rows to the rule's inputs.
        rule: the recurrence; one in steps (:mod:`.aligned`) takes the front and the norm with it.
        norm: the gated output norm; its gate is the layout's section ``z``. None stops before it,
            for a norm that is a module of its own.
        norm_kernels: :mod:`.readout.per_head_triton` or its plain twin.
        neighbours: boundaries, history and states; None: every batch row is one whole sequence.
        recompute: the rule's inputs that the backward computes again instead of saving them,
            beside those that are cheap.
        refilled: lets the consumer of the result drop it too, see :class:`RefilledOutput`.

    Returns:
        ``[S, B, H * V]``, ready for out_proj. Without ``norm``: o and z, both ``[B, S, H, V]``
        (z is a view of ``proj``).
    """
    neighbours = Neighbours() if neighbours is None else neighbours
    plan = Plan.of(front, rule, norm_kernels, neighbours, recompute)
    return plan.mix(proj, parameters, norm, refilled)


def gated_delta_mixer(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    rule: Rule,
    norm: GatedNorm | None,
    documents: Documents | None = None,
    neighbours: Neighbours | None = None,
    normalise_qk: bool = True,
    recompute_qkv: bool = False,
    refilled: RefilledOutput | None = None,
    kernels: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`mix` with the front of a Gated DeltaNet.

    Args:
        proj: ``[S, B, P]``, rows query | key | value | z | beta | alpha.
        conv_weight, conv_bias: ``[C, 1, W]`` or ``[C, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        rule: from :func:`.delta_rule.resolve.resolve_rule`.
        documents: boundaries of documents packed into the one batch row, resolved beforehand.
        neighbours: takes the place of ``documents``.
        normalise_qk: scale q and k to unit length.
        recompute_qkv: compute q, k and v again in the backward instead of saving them: less by
            ``2 (G K + H V)`` bytes per token in bf16, for one more pass over the projection.
        kernels: see :func:`.front.gdn_front.kernels_for`.

    Raises:
        ValueError: shapes that do not fit, packed documents with B > 1, fp16 operands without
            ``normalise_qk``.
    """
    require_fitting_rows(sizes, proj, conv_weight)
    if documents is not None:
        S, B = proj.shape[:2]
        require_one_row(B, f"a projection of shape {tuple(proj.shape)}")
        Documents.from_cu_seqlens(documents, S)
        assert neighbours is None
    plan = gated_delta_plan(
        proj, conv_weight.shape[-1], sizes, rule,
        Neighbours(documents) if neighbours is None else neighbours,
        normalise_qk, recompute_qkv, kernels,
    )  # fmt: skip
    return plan.mix(proj, (conv_weight, conv_bias, A_log, dt_bias), norm, refilled)


def require_fitting_rows(sizes: HeadSizes, proj: Tensor, conv_weight: Tensor) -> None:
    """Refuse rows or a convolution of other heads.

    Raises:
        ValueError: as :meth:`.HeadSizes.check_projection`; ``conv_weight`` has other channels or
            is not contiguous.
    """
    sizes.check_projection(proj)
    if conv_weight.shape[0] != sizes.conv_width or not conv_weight.is_contiguous():
        raise ValueError(
            f"conv_weight must be contiguous [{sizes.conv_width}, 1, W] for these heads, got "
            f"shape {tuple(conv_weight.shape)} and strides {conv_weight.stride()}."
        )


def gated_delta_plan(
    proj: Tensor,
    taps: int,
    sizes: HeadSizes,
    rule: Rule,
    neighbours: Neighbours,
    normalise_qk: bool = True,
    recompute_qkv: bool = False,
    kernels: str = "auto",
) -> Plan:
    """The plan of :func:`gated_delta_mixer` for rows like ``proj``: its device and dtype count.

    Raises:
        ValueError: fp16 operands without ``normalise_qk``, unknown ``kernels``.
    """
    if rule.operand_dtype is not None and not normalise_qk:
        raise ValueError(
            f"this rule takes q and k in {rule.operand_dtype}, whose range they may leave without "
            f"unit length; tell resolve_rule normalise_qk=False too, or choose operands='bf16'."
        )
    front_kernels, norm_kernels = kernels_for(proj, taps, kernels)
    front = GDNFront(sizes, front_kernels, normalise_qk, rule.operand_dtype, rule.batch_invariant)
    recompute = ("q", "k", "v") if recompute_qkv else ()
    return Plan.of(front, rule, norm_kernels, neighbours, recompute)
