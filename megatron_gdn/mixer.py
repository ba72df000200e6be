"""The middle of the layer, between in_proj and out_proj, on the rows that a scheme opens.

Legend: S tokens of those rows (of whole sequences, or of this rank's pieces), s this rank's tokens,
B batch, P projection width, H value heads, V value dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .micro_batch import MicroBatch
from .module_hooks import has_hooks, require_plain_conv, run_pre_hooks
from .observe import log_once
from .ops.head_sizes import HeadSizes
from .ops.layout import Layout
from .ops.mixer import Plan, gated_delta_plan, require_fitting_rows
from .ops.recompute import RefilledOutput, saved_tensors_are_hooked
from .ops.uncompiled import uncompiled
from .out_norm import apply_gated_norm, plain_norm, summing_group
from .precision import require_wide_gates

if TYPE_CHECKING:
    from .layer import GatedDeltaNet


class Mixer:
    """conv + SiLU, l2norm, gates, delta rule and gated norm as one autograd function.

    Args:
        recompute_norm: drop the normed output after the forward and compute it again for out_proj's
            backward; not where saved-tensor hooks keep it (a checkpoint around the layer, an
            offload).
        recompute_qkv: drop q, k and v and compute them again in the backward.
    """

    def __init__(self, recompute_norm: bool, recompute_qkv: bool) -> None:
        self.recompute_norm, self.recompute_qkv = recompute_norm, recompute_qkv

    @uncompiled  # its kernels and its tables, cached by value, gain nothing from tracing
    def __call__(
        self, layer: GatedDeltaNet, batch: MicroBatch, proj_SBP: Tensor
    ) -> tuple[Tensor, RefilledOutput | None]:
        """Projection rows, where the mixer runs, to rows for out_proj.

        Args:
            layer: whose parameters are used.
            batch: how it runs.
            proj_SBP: rows that ``batch.passage`` has opened.

        Returns:
            ``[s, B, H * V]`` over this rank's tokens; and ``refilled``, to call
            ``drop_until_backward_of(out_proj's output)`` on: None if nothing is computed again.

        Raises:
            ValueError: the layer's ``A_log`` or ``dt_bias`` is narrower than fp32.
            NotImplementedError: a pre-hook of ``conv1d`` changes its input, or ``conv1d`` has a
                forward of its own.
        """
        recompute_norm = self.recompute_norm and layer.training
        if recompute_norm and saved_tensors_are_hooked():
            log_once(
                "GatedDeltaNet: recompute_norm_out drops nothing where saved-tensor hooks are on "
                "(a checkpoint with use_reentrant=False, an offload): they keep what is saved."
            )
            recompute_norm = False
        refilled = RefilledOutput() if recompute_norm else None
        if layer.norm_out_checkpoint is not refilled:  # nn.Module's assignment is slow
            layer.norm_out_checkpoint = refilled
        scheme, close, group = batch.scheme, batch.passage.close, summing_group(layer)
        conv = layer.conv1d
        require_plain_conv(conv)
        if has_hooks(conv):  # before any parameter is read
            run_pre_hooks(conv, lambda: _conv_input(proj_SBP, scheme.layout))
        norm_here = plain_norm(layer.out_norm, group)
        weight, bias, A_log, dt_bias = conv.weight, conv.bias, layer.A_log, layer.dt_bias
        if not A_log.dtype == dt_bias.dtype == torch.float32:
            require_wide_gates(layer)
        if scheme.moves_rows:
            convolved = scheme.layout.conv_names
            weight = scheme.local(weight, convolved)
            bias = None if bias is None else scheme.local(bias, convolved)
            A_log, dt_bias = scheme.local(A_log), scheme.local(dt_bias)
        kind = weight.shape[-1], layer.use_qk_l2norm, self.recompute_qkv
        sizes, plan = batch.held.get(kind) or self._hold(batch, kind, proj_SBP)
        require_fitting_rows(sizes, proj_SBP, weight)
        mixed = plan.mix(
            proj_SBP, (weight, bias, A_log, dt_bias), norm_here,
            None if norm_here is None else refilled,
        )  # fmt: skip

        if isinstance(mixed, Tensor):
            if not scheme.moves_rows:
                return mixed, refilled
            closed = close(mixed)
            if refilled is not None:
                refilled.passed_on(closed, close)  # this is what out_proj saves
            return closed, refilled

        def norm(o_BSHV: Tensor, z_BSHV: Tensor) -> Tensor:
            y_BSHV = apply_gated_norm(layer.out_norm, o_BSHV, z_BSHV, group)
            return y_BSHV.flatten(2).transpose(0, 1).contiguous()

        if refilled is None:
            return close(norm(*mixed)), None
        # The norm's intermediates are dropped too, so it is called three times in all. This is not
        # Megatron's checkpoint, which compiles a C++ extension in the first backward.
        normed: Any = checkpoint(norm, *mixed, use_reentrant=False, preserve_rng_state=False)
        closed = close(normed)
        o_BSHV, z_BSHV = (x.detach() for x in mixed)

        def refill(out: Tensor) -> None:
            out.copy_(close(norm(o_BSHV, z_BSHV)))

        refilled.remember(closed, refill)
        return closed, refilled

    def _hold(
        self, batch: MicroBatch, kind: tuple[int, bool, bool], like: Tensor
    ) -> tuple[HeadSizes, Plan]:
        """The plan of rows ``like`` these, kept with their micro-batch."""
        taps, normalise_qk, recompute_qkv = kind
        sizes = HeadSizes.of(batch.scheme.layout)
        plan = gated_delta_plan(
            like, taps, sizes, batch.rule, batch.passage.neighbours, normalise_qk, recompute_qkv
        )
        batch.held[kind] = sizes, plan
        return sizes, plan


def _conv_input(proj_SBP: Tensor, layout: Layout) -> Tensor:
    """``[B, C, S]``, what a call of conv1d would be given; a view without a gradient."""
    return proj_SBP.detach()[..., layout.conv_columns].permute(1, 2, 0)
