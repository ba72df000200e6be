"""The middle of the layer, between in_proj and out_proj, on whole sequences of one rank's heads.

Legend: S tokens of whole sequences, s this rank's tokens, B batch, P projection width, H value
heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn

from .context_parallel import Headwise, SingleRank
from .local_norm import TorchRMSNorm
from .ops import Documents
from .ops.fused import Core, GatedNorm, HeadSizes, gated_delta_mixer
from .ops.fused.recompute import RefilledOutput

if TYPE_CHECKING:
    from .layer import GatedDeltaNet


def heads_of(dims) -> HeadSizes:
    """The kernels' view of :class:`~megatron_gdn.dims.GDNDims`."""
    return HeadSizes(
        dims.num_key_heads, dims.num_value_heads, dims.key_head_dim, dims.value_head_dim
    )


def announce_use(module: nn.Module) -> None:
    """Run a module's forward pre-hooks, for a module whose parameters are read without a call.

    Megatron's data-parallel wrapper waits there for the gather of the module's parameters
    (``overlap_param_gather``); reading them without it could read last step's values.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def fused_norm(module: nn.Module) -> Callable[[], GatedNorm] | None:
    """How to read ``out_norm`` as a plain RMSNorm; None when it is something else.

    Known are ours, torch's and Transformer Engine's RMSNorm without hooks of their own on the
    output; any other module is called as it is.
    """
    names = {f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(module).__mro__}
    known = isinstance(module, TorchRMSNorm | nn.RMSNorm) or "transformer_engine.RMSNorm" in names
    eps = getattr(module, "eps", None)
    if not known or eps is None or module._forward_hooks or module.weight is None:
        return None
    centered = bool(getattr(module, "zero_centered_gamma", False))

    def read() -> GatedNorm:
        announce_use(module)
        return GatedNorm(module.weight, eps, centered)

    return read


class Mixer:
    """conv + SiLU, l2norm, gates, delta rule and gated norm as one autograd function.

    Args:
        core: implementation of the delta rule.
        out_norm: the layer's output norm; fused where it is a plain RMSNorm.
        recompute_norm: drop the normed output after the forward and compute it again for out_proj's
            backward.
        recompute_qkv: drop q, k and v and compute them again in the backward.
    """

    def __init__(
        self, core: Core, out_norm: nn.Module, recompute_norm: bool, recompute_qkv: bool
    ) -> None:
        self.core, self.out_norm = core, out_norm
        self.fused_norm = fused_norm(out_norm)
        self.recompute_norm, self.recompute_qkv = recompute_norm, recompute_qkv

    def __call__(
        self,
        layer: GatedDeltaNet,
        proj_SBP: Tensor,
        scheme: SingleRank | Headwise,
        documents: Documents | None,
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Projection rows of whole sequences to rows for out_proj.

        Returns:
            ``[s, B, H * V]`` over this rank's tokens, and a function to be called with out_proj's
            output, which frees what the backward will compute again.
        """
        recompute_norm = self.recompute_norm and layer.training
        # Across ranks out_proj reads what came through the exchange, so that is dropped too.
        norm_here = self.fused_norm is not None and not (recompute_norm and scheme.size > 1)
        refilled = RefilledOutput() if recompute_norm and norm_here else None
        announce_use(layer.conv1d)
        sections, bias = layer.dims.layout.conv_sections, layer.conv1d.bias
        mixed = gated_delta_mixer(
            proj_SBP,
            scheme.local(layer.conv1d.weight, sections),
            None if bias is None else scheme.local(bias, sections),
            scheme.local(layer.A_log),
            scheme.local(layer.dt_bias),
            heads_of(scheme.dims),
            core=self.core,
            norm=self.fused_norm() if norm_here else None,
            documents=documents,
            normalise_qk=layer.use_qk_l2norm,
            recompute_qkv=self.recompute_qkv,
            refilled=refilled,
        )
        if norm_here:
            release = _nothing if refilled is None else refilled.drop_until_backward_of
            return scheme.close(mixed, documents), release

        def norm_and_close(o_BSHV: Tensor, z_BSHV: Tensor) -> Tensor:
            y_BSHV = apply_gated_norm(self.out_norm, o_BSHV, z_BSHV)
            return scheme.close(y_BSHV.flatten(2).transpose(0, 1).contiguous(), documents)

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
