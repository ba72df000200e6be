"""The middle of the layer, between in_proj and out_proj, on the rows that a scheme hands it.

Legend: S tokens of those rows (of whole sequences, or of this rank's pieces), s this rank's tokens,
B batch, P projection width, H value heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn

from .local_norm import TorchRMSNorm
from .micro_batch import MicroBatch
from .observe import log_once
from .ops.head_sizes import HeadSizes
from .ops.mixer import GatedNorm, gated_delta_mixer
from .ops.recompute import RefilledOutput, saved_tensors_are_hooked

if TYPE_CHECKING:
    from .layer import GatedDeltaNet


def require_wide_gates(layer: GatedDeltaNet) -> None:
    """Refuse decay parameters that something rounded on their way into the layer.

    Casts of the module leave them fp32 (:mod:`megatron_gdn.precision`); what puts other tensors in
    their place, as sharded data parallelism with a dtype of its own does, is seen only here.

    Raises:
        ValueError: ``A_log`` or ``dt_bias`` is narrower than fp32.
    """
    for name in ("A_log", "dt_bias"):
        dtype = getattr(layer, name).dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} reached the layer in {dtype}, and must be torch.float32 (or float64): it "
                f"stands in the exponent of a decay that the recurrence compounds. Under torch's "
                f"fully_shard, give this layer a MixedPrecisionPolicy without param_dtype; "
                f"elsewhere, do not replace the layer's parameters by rounded ones."
            )


def announce_use(module: nn.Module) -> None:
    """Run a module's forward pre-hooks, for a module whose parameters are read without a call.

    Megatron's data-parallel wrapper waits there for the gather of the module's parameters
    (``overlap_param_gather``); reading them without it could read last step's values.
    """
    for key, hook in list(module._forward_pre_hooks.items()):  # a hook may remove itself
        takes_keywords = key in module._forward_pre_hooks_with_kwargs
        hook(module, (), {}) if takes_keywords else hook(module, ())


def is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether ``out_norm`` is an RMSNorm that the kernels can compute themselves.

    Known are ours, torch's and Transformer Engine's, without hooks on the output when the layer is
    built (later ones are not called); any other module is called as it is.
    """
    names = {f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(module).__mro__}
    known = isinstance(module, TorchRMSNorm | nn.RMSNorm) or "transformer_engine.RMSNorm" in names
    return (
        known
        and getattr(module, "eps", None) is not None
        and module.weight is not None
        and not module._forward_hooks
    )


def read_norm(module: nn.Module) -> GatedNorm:
    """The parameters of such a norm."""
    announce_use(module)
    return GatedNorm(module.weight, module.eps, bool(getattr(module, "zero_centered_gamma", False)))


class Mixer:
    """conv + SiLU, l2norm, gates, delta rule and gated norm as one autograd function.

    Args:
        fuse_norm: compute the layer's ``out_norm``, a plain RMSNorm, in here.
        recompute_norm: drop the normed output after the forward and compute it again for out_proj's
            backward; not where saved-tensor hooks keep it (a checkpoint around the layer, an
            offload).
        recompute_qkv: drop q, k and v and compute them again in the backward.
    """

    def __init__(self, fuse_norm: bool, recompute_norm: bool, recompute_qkv: bool) -> None:
        self.fuse_norm = fuse_norm
        self.recompute_norm, self.recompute_qkv = recompute_norm, recompute_qkv

    @torch.compiler.disable  # one kernel after the other already, from tables cached by value
    def __call__(
        self,
        layer: GatedDeltaNet,
        batch: MicroBatch,
        proj_SBP: Tensor,
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Projection rows, where the mixer runs, to rows for out_proj.

        Args:
            layer: whose parameters are used.
            batch: how it runs.
            proj_SBP: rows that ``batch.passage`` has opened.

        Returns:
            ``[s, B, H * V]`` over this rank's tokens, and a function to be called with out_proj's
            output, which frees what the backward will compute again.

        Raises:
            ValueError: the layer's ``A_log`` or ``dt_bias`` is narrower than fp32.
        """
        require_wide_gates(layer)
        scheme, close = batch.scheme, batch.passage.close
        recompute_norm = self.recompute_norm and layer.training
        if recompute_norm and saved_tensors_are_hooked():
            log_once(
                "GatedDeltaNet: recompute_norm_out drops nothing where saved-tensor hooks are on "
                "(a checkpoint with use_reentrant=False, an offload): they keep what is saved."
            )
            recompute_norm = False
        # Where out_proj reads what came through an exchange, that is what is dropped.
        norm_here = self.fuse_norm and not (recompute_norm and scheme.moves_rows)
        refilled = RefilledOutput() if recompute_norm and norm_here else None
        announce_use(layer.conv1d)
        convolved, bias = scheme.layout.conv_names, layer.conv1d.bias
        mixed = gated_delta_mixer(
            proj_SBP,
            scheme.local(layer.conv1d.weight, convolved),
            None if bias is None else scheme.local(bias, convolved),
            scheme.local(layer.A_log),
            scheme.local(layer.dt_bias),
            HeadSizes.of(scheme.layout),
            rule=batch.rule,
            norm=read_norm(layer.out_norm) if norm_here else None,
            neighbours=batch.passage.neighbours,
            normalise_qk=layer.use_qk_l2norm,
            recompute_qkv=self.recompute_qkv,
            refilled=refilled,
        )
        if norm_here:
            release = _nothing if refilled is None else refilled.drop_until_backward_of
            return close(mixed), release

        def norm_and_close(o_BSHV: Tensor, z_BSHV: Tensor) -> Tensor:
            y_BSHV = apply_gated_norm(layer.out_norm, o_BSHV, z_BSHV)
            return close(y_BSHV.flatten(2).transpose(0, 1).contiguous())

        if not recompute_norm:
            return norm_and_close(*mixed), _nothing
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=layer.config.fp8)
        layer.norm_out_checkpoint = checkpoint
        return (
            checkpoint.checkpoint(norm_and_close, *mixed),
            checkpoint.discard_output_and_register_recompute,
        )


def apply_gated_norm(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """``norm(x) * SiLU(gate)`` in ``x.dtype``, the product taken in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (norm(x) * F.silu(gate.to(wide))).to(x.dtype)


def _nothing(out: Tensor) -> None:
    """Nothing to free."""
