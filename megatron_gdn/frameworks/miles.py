"""For miles and slime:
``--custom-megatron-init-path megatron_gdn.frameworks.miles.enable``."""

from .patch import patch_megatron

# miles and slime define their own layers in modules whose names begin with one of
# these. These layers have transformers' parameters.
_PLUGIN_MODULE_PREFIXES = (
    "miles_plugins.models.qwen3_",
    "slime_plugins.models.qwen3_",
)


def enable(args: object) -> None:
    """Call ``patch_megatron``; miles and slime do this in each worker before they build
    a model.

    Raises a ValueError for a ``--spec`` that builds layers of miles or slime, not of
    Megatron.
    """
    spec = getattr(args, "spec", None) or ""
    if isinstance(spec, str):
        module = spec
    else:
        module = spec[0]
    # Megatron-Bridge builds the model without reading --spec
    by_bridge = getattr(args, "megatron_to_hf_mode", None) == "bridge"
    if module.startswith(_PLUGIN_MODULE_PREFIXES) and not by_bridge:
        raise ValueError(
            f"--spec {module} builds layers of its own, and megatron_gdn replaces only "
            "Megatron's layers. slime: give --spec megatron_gdn.frameworks.slime "
            "get_qwen3_5_spec (or get_qwen3_next_spec). miles: build the model by "
            "Megatron-Bridge (--megatron-to-hf-mode bridge). Or leave "
            "--custom-megatron-init-path out."
        )
    patch_megatron()
