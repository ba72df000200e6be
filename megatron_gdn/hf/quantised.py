"""Recognises quantised weights by their keys and dtypes, and refuses them by their
format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .safetensors_files import TensorSpec

_FP8 = ("F8_E4M3", "F8_E5M2")
_POWERS_OF_TWO = ("U8", "F8_E8M0")  # dtypes of the scales of MXFP4 and MXFP8
# Ends of the keys of scales, after a weight's key and after its module's.
_OF_WEIGHT = ("_scale_inv", "_scale", "_scale_2")
_OF_MODULE = ("SCB", "weight_global_scale")


class _Quantised(NamedTuple):
    """A weight's format, and the key of its scales; None if it has none."""

    format: str
    scales: str | None


def refuse_quantised(specs: Mapping[str, TensorSpec]) -> None:
    """Raise a NotImplementedError if one of the tensors ``specs`` is quantised, or has
    scales."""
    for key, spec in specs.items():
        found = _read_format(key, specs)
        if found is None:
            continue
        scales = "no scales"
        if found.scales is not None:
            of_scales = specs[found.scales]
            scales = (
                f"scales {of_scales.dtype} {list(of_scales.shape)} in {found.scales}"
            )
        raise NotImplementedError(
            f"{key} is {found.format} ({spec.dtype}, {scales}); weights must be BF16, "
            "F16 or F32. Convert them to BF16 first."
        )
    for key in specs:
        weight = _weight_of_scales(key, specs)
        if weight is None:
            continue
        if weight in specs:
            state = f"is {specs[weight].dtype}"
        else:
            state = "is missing"
        raise NotImplementedError(
            f"{key} has scales of a quantised weight, but {weight} {state}; weights in "
            "BF16, F16 or F32 have no scales. Convert the quantised weights again: "
            "multiply each by its scales, and leave the scales out."
        )


def _read_format(key: str, specs: Mapping[str, TensorSpec]) -> _Quantised | None:
    """The format of the quantised weight ``key``; None if it is another tensor."""
    spec = specs[key]
    module, _, name = key.rpartition(".")
    prefix = f"{module}." if module else ""
    if name == "qweight":  # of an AWQ folder; a GPTQ folder may leave g_idx out
        is_gptq = f"{prefix}g_idx" in specs
        return _Quantised(
            "GPTQ" if is_gptq else "AWQ or GPTQ", _stored(f"{prefix}scales", specs)
        )
    if name == "weight_packed":  # of compressed-tensors
        scales = _stored(f"{prefix}weight_scale", specs)
        if spec.dtype != "U8":
            return _Quantised("packed INT4 or INT8", scales)
        is_nvfp4 = f"{prefix}weight_global_scale" in specs
        return _Quantised("NVFP4" if is_nvfp4 else "MXFP4", scales)
    if name.endswith("_blocks") and spec.dtype == "U8":
        scales = _stored(f"{key.removesuffix('blocks')}scales", specs)
        if scales is None:
            return None
        return _Quantised("MXFP4", scales)
    scales = _stored(f"{key}_scale_inv", specs) or _stored(f"{key}_scale", specs)
    if spec.dtype in _FP8 and _weight_of_scales(key, specs) is None:
        return _Quantised(_name_fp8(spec, scales, specs), scales)
    if spec.dtype == "I8":
        scales = scales or _stored(f"{prefix}SCB", specs)  # SCB: of bitsandbytes
        if scales is None:
            return None
        return _Quantised("INT8", scales)
    if spec.dtype == "U8" and f"{key}_scale_2" in specs:
        return _Quantised("NVFP4", scales)
    if spec.dtype == "U8" and f"{key}.absmax" in specs:
        return _Quantised("4-bit of bitsandbytes", f"{key}.absmax")
    return None


def _stored(key: str, specs: Mapping[str, TensorSpec]) -> str | None:
    """``key`` if there is such a tensor."""
    if key in specs:
        return key
    return None


def _name_fp8(
    spec: TensorSpec, scales: str | None, specs: Mapping[str, TensorSpec]
) -> str:
    """Which FP8 format the weight ``spec`` has, as the dtype and shape of its scales
    say; ``scales`` is the name of that tensor, or None."""
    if scales is None:
        return "FP8"
    if specs[scales].dtype in _POWERS_OF_TWO:
        return "MXFP8"
    # the number of dimensions before rows and columns
    experts = max(len(spec.shape) - 2, 0)
    shape = specs[scales].shape[experts:]
    rows = spec.shape[experts:-1]
    if shape in ((), (1,)):
        return "per-tensor FP8"
    if shape in (rows, rows + (1,)):
        return "per-channel FP8"
    return "block-scaled FP8"


def _weight_of_scales(key: str, specs: Mapping[str, TensorSpec]) -> str | None:
    """The key of the weight whose scales are the tensor ``key``; None if it has no
    scales."""
    module, _, name = key.rpartition(".")
    if name in _OF_MODULE:
        return f"{module}.weight"
    for end in _OF_WEIGHT:
        weight = key.removesuffix(end)
        if name == f"weight{end}" or (weight != key and weight in specs):
            return weight
    return None
