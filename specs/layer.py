"""Our mixers as Megatron ModuleSpecs, over Transformer Engine or local modules."""

from typing import Any, Literal

from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.gdn.layer import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron_gdn.kda.layer import KimiDeltaAttention, KimiDeltaAttentionSubmodules
from megatron_gdn.mamba2.layer import Mamba2Mixer, Mamba2MixerSubmodules

MODULES = ("auto", "local", "te")


def resolve_modules(modules: str) -> Literal["te", "local"]:
    """``"auto"`` becomes ``"te"`` or ``"local"``; an explicit choice is kept or refused."""
    if modules not in MODULES:
        raise ValueError(
            f"unknown modules {modules!r}; use one of {', '.join(MODULES)}. (The delta rule is "
            f"chosen by the keyword backend.)"
        )
    if modules == "auto":
        return "te" if te.HAVE_TE else "local"
    if modules == "te" and not te.HAVE_TE:
        raise ImportError(
            'modules="te" needs Transformer Engine, which cannot be imported here. Install '
            '`transformer-engine[pytorch]`, or use modules="local" (plain torch modules).'
        )
    return modules


def gated_delta_net_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.GatedDeltaNet` for the ``self_attention`` place of a TransformerLayer.

    Args:
        modules: ``"te"`` fuses the norm before the mixer into ``in_proj``; ``"local"`` uses
            Megatron's own linears and leaves that norm to the layer around the mixer; ``"auto"``
            is ``"te"`` where Transformer Engine is installed.
        **options: keyword arguments of the GatedDeltaNet constructor, such as ``backend``.

    Raises:
        ValueError: unknown ``modules``.
        ImportError: ``"te"`` without Transformer Engine.
    """
    return _delta_spec(GatedDeltaNet, GatedDeltaNetSubmodules, modules, options)


def kimi_delta_attention_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.KimiDeltaAttention` for the ``self_attention`` place of a layer.

    Args:
        modules: as in `gated_delta_net_spec`.
        **options: keyword arguments of the KimiDeltaAttention constructor.
    """
    return _delta_spec(KimiDeltaAttention, KimiDeltaAttentionSubmodules, modules, options)


def mamba2_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.Mamba2Mixer` for the ``mixer`` place of a MambaLayer.

    Args:
        modules: as in `gated_delta_net_spec`; the norm of a local MambaLayer is its ``norm``.
        **options: keyword arguments of the Mamba2Mixer constructor.
    """
    in_proj, out_proj, _ = _modules(resolve_modules(modules))
    submodules = Mamba2MixerSubmodules(in_proj=in_proj, out_proj=out_proj)
    return ModuleSpec(module=Mamba2Mixer, params=options, submodules=submodules)


def _delta_spec(mixer: type, parts: type, modules: str, options: dict[str, Any]) -> ModuleSpec:
    modules = resolve_modules(modules)
    in_proj, out_proj, norm = _modules(modules)
    return ModuleSpec(
        module=mixer,
        params=options,
        submodules=parts(in_proj=in_proj, out_norm=norm, out_proj=out_proj),
        # Megatron's GPT block spec reads this to decide whether the layer needs its own norm.
        metainfo={"fuse_input_layernorm": modules == "te"},
    )


def _modules(modules: str) -> tuple[type, type, type]:
    """The linears before and after a mixer, and a norm."""
    if modules == "te":
        return te.TELayerNormColumnParallelLinear, te.TERowParallelLinear, te.TENorm
    return ColumnParallelLinear, RowParallelLinear, TorchRMSNorm
