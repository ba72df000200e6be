"""The Gated DeltaNet mixer as a Megatron ModuleSpec, over Transformer Engine or local modules."""

from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_gdn.layer import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron_gdn.local_norm import TorchRMSNorm

BACKENDS = ("auto", "local", "te")


def resolve_backend(backend: str) -> str:
    """Turn ``"auto"`` into ``"te"`` or ``"local"``; an explicit choice is kept or refused.

    Raises:
        ValueError: not one of auto, local, te.
        ImportError: ``"te"`` without Transformer Engine.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown spec backend {backend!r}; use one of {', '.join(BACKENDS)}.")
    if backend == "auto":
        return "te" if te.HAVE_TE else "local"
    if backend == "te" and not te.HAVE_TE:
        raise ImportError(
            'backend="te" needs Transformer Engine, which cannot be imported here. Install '
            '`transformer-engine[pytorch]`, or use backend="local" (plain torch modules).'
        )
    return backend


def gated_delta_net_spec(
    backend: str = "auto", *, rule_backend: str | None = None, **options: Any
) -> ModuleSpec:
    """Spec of `megatron_gdn.GatedDeltaNet` for the ``self_attention`` place of a TransformerLayer.

    Args:
        backend: ``"te"`` fuses the norm before the mixer into ``in_proj``; ``"local"`` uses
            Megatron's own linears and leaves that norm to the TransformerLayer's
            ``input_layernorm``; ``"auto"`` is ``"te"`` where Transformer Engine is installed.
        rule_backend: ``backend`` of the GatedDeltaNet constructor, the implementation of the
            delta rule; the layer's default when None.
        **options: other keyword arguments of that constructor.
    """
    if rule_backend is not None:
        options["backend"] = rule_backend
    if resolve_backend(backend) == "te":
        submodules = GatedDeltaNetSubmodules(
            in_proj=te.TELayerNormColumnParallelLinear,
            out_norm=te.TENorm,
            out_proj=te.TERowParallelLinear,
        )
        fused = True
    else:
        submodules = GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=TorchRMSNorm, out_proj=RowParallelLinear
        )
        fused = False
    return ModuleSpec(
        module=GatedDeltaNet,
        params=options,
        submodules=submodules,
        # Megatron's GPT block spec reads this to decide whether the layer needs its own norm.
        metainfo={"fuse_input_layernorm": fused},
    )
