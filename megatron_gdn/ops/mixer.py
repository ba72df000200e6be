"""The mixer of a Gated DeltaNet layer as one autograd function: projection rows in, mixed rows out.

    q, k, v = conv + SiLU (+ l2norm of q, k);  g, beta = gates   one kernel over strided rows
    o       = gated delta rule                                   the core
    mixed   = RMSNorm(o) * SiLU(z)                               one kernel, written as [S, B, H V]

One function, so that what is saved is only what the backward reads, and every gradient of the
projection is written once, into its own columns of one buffer.

Legend: S seq, B batch, P projection width, G key heads, H value heads, K key dim, V value dim,
C conv channels, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .delta_rule.base import Core, RuleInputs
from .documents import Documents
from .front.base import Preparation, SplitSequences
from .head_sizes import HeadSizes
from .no_tokens import mix_no_tokens
from .once import say_once
from .recompute import RefilledOutput
from .unfilled import unfilled_memory


class GatedNorm(NamedTuple):
    """The output norm: ``RMSNorm(o) * gamma * SiLU(z)``, or ``* (1 + gamma)`` zero-centered."""

    gamma: Tensor  # [V]
    eps: float = 1e-6
    zero_centered: bool = False


@dataclass(frozen=True, eq=False)
class _Plan:
    sizes: HeadSizes
    core: Core
    documents: Documents | None
    normalise_qk: bool
    eps: float | None  # of the output norm; None: no norm here
    zero_centered: bool
    again: str  # which of q, k and v the backward computes again
    keep: bool
    prepare: Preparation
    norm: ModuleType
    refilled: RefilledOutput | None


def _why_not_triton(proj: Tensor, conv_weight: Tensor) -> str | None:
    if not proj.is_cuda:
        return f"the Triton kernels run on a GPU, not on {proj.device.type}"
    if proj.dtype == torch.float64:
        return "the Triton kernels compute in fp32, not in fp64"
    if not 2 <= conv_weight.shape[-1] <= 8:
        return f"the Triton kernels take 2 to 8 conv taps, not {conv_weight.shape[-1]}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def kernels_for(proj: Tensor, conv_weight: Tensor, kernels: str) -> tuple[ModuleType, ModuleType]:
    """The preparation and the norm: our Triton kernels or their plain-torch twins."""
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'.")
    if kernels == "auto":
        why = _why_not_triton(proj, conv_weight)
        kernels = "triton" if why is None else "torch"
        if why is not None:
            say_once(f"Gated DeltaNet runs conv, gates and norm in plain torch: {why}.",
                     proj.device.type)  # fmt: skip
    if kernels == "triton":
        from .front import gdn as prepare
        from .gated_norm import norm

        return prepare, norm
    from .front import gdn_torch as prepare_torch
    from .gated_norm import norm_torch

    return prepare_torch, norm_torch


class _Mixer(torch.autograd.Function):
    @staticmethod
    @unfilled_memory()
    def forward(ctx, proj, conv_weight, conv_bias, A_log, dt_bias, gamma, plan: _Plan):
        parameters = (conv_weight, conv_bias, A_log, dt_bias)
        prepared = plan.prepare.prepare_forward(
            proj, *parameters, plan.sizes,
            documents=plan.documents, normalise_qk=plan.normalise_qk,
            dtype=plan.core.operand_dtype, batch_invariant=plan.core.batch_invariant,
        )  # fmt: skip
        inputs = RuleInputs(*prepared)
        o, saved, core_plan = plan.core.forward(inputs, plan.documents, plan.keep)
        if plan.keep:
            qkv = (
                None if name in plan.again else x for name, x in zip("qkv", inputs[:3], strict=True)
            )
            with_norm = None if plan.eps is None else o
            ctx.save_for_backward(proj, *parameters, gamma, with_norm, inputs.beta, *qkv, *saved)
            ctx.plan, ctx.core_plan = plan, core_plan
        if plan.eps is None:
            z = proj[..., plan.sizes.z_column : plan.sizes.beta_column]
            return o.to(proj.dtype), z.unflatten(-1, (plan.sizes.value_heads, -1)).transpose(0, 1)
        mixed = plan.norm.gated_norm_forward(
            o, proj, gamma, plan.sizes, eps=plan.eps, zero_centered=plan.zero_centered
        )
        if plan.refilled is not None:

            def refill(out: Tensor) -> None:
                plan.norm.gated_norm_forward(
                    o, proj, gamma, plan.sizes,
                    eps=plan.eps, zero_centered=plan.zero_centered, out=out,
                )  # fmt: skip

            plan.refilled.remember(mixed, refill)
        return mixed

    @staticmethod
    @once_differentiable
    @unfilled_memory()
    def backward(ctx, d_out: Tensor, d_z: Tensor | None = None):
        plan: _Plan = ctx.plan
        proj, conv_weight, conv_bias, A_log, dt_bias, gamma, o, beta, q, k, v, *saved = (
            ctx.saved_tensors
        )
        parameters = (conv_weight, conv_bias, A_log, dt_bias)
        sizes = plan.sizes
        d_proj = proj.new_empty(proj.shape)
        d_gamma = None
        if plan.eps is None:
            z_rows = d_proj[..., sizes.z_column : sizes.beta_column]
            if d_z is None:
                z_rows.zero_()
            else:
                z_rows.copy_(d_z.transpose(0, 1).flatten(2))
            d_o = d_out.contiguous()
        else:
            d_o, d_gamma = plan.norm.gated_norm_backward(
                d_out, o, proj, gamma, sizes, d_proj,
                eps=plan.eps, zero_centered=plan.zero_centered,
            )  # fmt: skip
            del d_out
        gradient = [d_o]
        del d_o
        made = plan.prepare.prepare_forward(
            proj, *parameters, sizes, documents=plan.documents, normalise_qk=plan.normalise_qk,
            parts=plan.again, dtype=plan.core.operand_dtype,
            batch_invariant=plan.core.batch_invariant,
        )  # fmt: skip
        q, k, v = (x if y is None else y for x, y in zip((q, k, v), made[:3], strict=True))
        del made
        # Handed over, not lent: a core that makes another form of the gradient can free this one.
        *rule_grads, factor = plan.core.backward(
            gradient.pop(), RuleInputs(q, k, v, None, beta), tuple(saved), ctx.core_plan,
            plan.documents,
        )  # fmt: skip
        del q, k, v
        grads = plan.prepare.prepare_backward(
            proj, *parameters, sizes, *rule_grads, d_proj,
            documents=plan.documents, factor=factor, normalise_qk=plan.normalise_qk,
            batch_invariant=plan.core.batch_invariant,
        )  # fmt: skip
        return d_proj, *grads, d_gamma, None


def gated_delta_mixer(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    core: Core,
    norm: GatedNorm | None,
    documents: Documents | None = None,
    split: SplitSequences | None = None,
    normalise_qk: bool = True,
    recompute_qkv: bool = False,
    refilled: RefilledOutput | None = None,
    kernels: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Everything between in_proj and out_proj, for the heads one rank holds.

    Args:
        proj: ``[S, B, P]``, rows query | key | value | z | beta | alpha; any strides of S and B.
        conv_weight, conv_bias: ``[C, 1, W]`` or ``[C, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        core: the delta rule, from :func:`resolve_core`.
        norm: the gated output norm. None stops before it, for a norm that is a module of its own.
        documents: boundaries of documents packed into the one batch row, resolved beforehand.
        split: the rows are pieces of sequences that go on elsewhere; says how the preparation and
            the core get what comes from there. Takes the place of ``documents``.
        normalise_qk: scale q and k to unit length.
        recompute_qkv: compute q, k and v again in the backward instead of saving them: less by
            ``2 (G K + H V)`` bytes per token in bf16, for one more pass over the projection. q is
            never saved: it is the part whose second pass costs least for the bytes it frees.
        refilled: lets the consumer of the result drop it too, see :class:`RefilledOutput`.
        kernels: ``"auto"`` (Triton on a GPU, for 2 to 8 taps and any dtype but fp64),
            ``"triton"`` or ``"torch"``.

    Returns:
        ``[S, B, H * V]``, ready for out_proj. Without ``norm``: o and z, both ``[B, S, H, V]``
        (z is a view of ``proj``).

    Raises:
        ValueError: shapes that do not fit, packed documents with B > 1, fp16 operands without
            ``normalise_qk``.
    """
    sizes.check_projection(proj)
    S, B = proj.shape[:2]
    if conv_weight.shape[0] != sizes.conv_width or not conv_weight.is_contiguous():
        raise ValueError(
            f"conv_weight must be contiguous [{sizes.conv_width}, 1, W] for these heads, got "
            f"shape {tuple(conv_weight.shape)} and strides {conv_weight.stride()}."
        )
    if documents is not None:
        if B != 1:
            raise ValueError(
                f"packed documents need a batch of 1, got a projection of shape "
                f"{tuple(proj.shape)}. Lay the rows end to end and extend cu_seqlens."
            )
        Documents.from_cu_seqlens(documents, S)
    if split is not None:
        assert documents is None and split.pieces.total_tokens == S
    if core.operand_dtype is not None and not normalise_qk:
        raise ValueError(
            f"this core takes q and k in {core.operand_dtype}, whose range they may leave without "
            f"unit length; tell resolve_core normalise_qk=False too, or choose operands='bf16'."
        )
    if refilled is not None and norm is None:
        raise ValueError("refilled repeats the gated norm, so it needs norm.")
    gamma, eps, zero_centered = (None, None, False) if norm is None else norm
    tensors = (proj, conv_weight, conv_bias, A_log, dt_bias, gamma)
    if S * B == 0:  # on every rank that shares the sequences, so nobody waits for rows of them
        return mix_no_tokens(*tensors, sizes=sizes, with_norm=norm is not None)
    prepare_module, norm_module = kernels_for(proj, conv_weight, kernels)
    if split is not None:
        documents, core = split.pieces, split.core(core)
        prepare_module = split.preparation(prepare_module)
    plan = _Plan(
        sizes=sizes,
        core=core,
        documents=documents,
        normalise_qk=normalise_qk,
        eps=eps,
        zero_centered=zero_centered,
        again="qkv" if recompute_qkv else "q",
        keep=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors),
        prepare=prepare_module,
        norm=norm_module,
        refilled=refilled,
    )
    return _Mixer.apply(*tensors, plan)
