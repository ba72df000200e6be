"""For ``--custom-megatron-init-path megatron_gdn.frameworks.miles.enable`` of miles and slime."""

from typing import Any

from .patch import patch_megatron

# Their modules whose layers are not Megatron's and hold transformers' parameters.
_OWN_LAYERS = tuple(f"{name}_plugins.models.qwen3_" for name in ("miles", "slime"))


def enable(args: Any) -> None:
    """miles and slime call this in each worker, after Megatron's start and before a model is built.

    A launch that builds such layers of theirs, which we cannot replace, is a ValueError.
    """
    spec = getattr(args, "spec", None) or ""
    module = spec if isinstance(spec, str) else spec[0]
    by_bridge = getattr(args, "megatron_to_hf_mode", None) == "bridge"  # which reads no spec
    if module.startswith(_OWN_LAYERS) and not by_bridge:
        raise ValueError(
            f"--spec {module} builds layers of its own, and megatron_gdn replaces Megatron's "
            f"alone. slime: give --spec megatron_gdn.frameworks.slime get_qwen3_5_spec (or "
            f"get_qwen3_next_spec). miles: build the model by Megatron-Bridge "
            f"(--megatron-to-hf-mode bridge). Or leave --custom-megatron-init-path out."
        )
    patch_megatron()
