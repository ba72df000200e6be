"""Recognises quantised weights by their keys and dtypes; refuses them with the name of
their format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .safetensors_files import TensorSpec

_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
# dtypes of scales that are powers of two, in MXFP4 and MXFP8
_POWER_OF_TWO_DTYPES = ("U8", "F8_E8M0")
# The key of scales is the weight's key with one of these suffixes. Or it is one of these
# names, after the key of the weight's module and a dot.
_SUFFIXES_OF_SCALES = ("_scale_inv", "_scale", "_scale_2")
_NAMES_OF_SCALES = ("SCB", "weight_global_scale")


class _QuantisedFormat(NamedTuple):
    """The format of a quantised weight."""

    name: str
    scales_key: str | None  # the key of the weight's scales; None if it has no scales


def refuse_quantised(specs: Mapping[str, TensorSpec]) -> None:
    """Raise a NotImplementedError if one of the tensors ``specs`` is quantised, or has
    scales."""
    for key, spec in specs.items():
        found = _find_format(key, specs)
        if found is None:
            continue
        scales_text = "no scales"
        if found.scales_key is not None:
            scales = specs[found.scales_key]
            scales_text = (
                f"scales {scales.dtype} {list(scales.shape)} in {found.scales_key}"
            )
        raise NotImplementedError(
            f"{key} is {found.name} ({spec.dtype}, {scales_text}); weights must be "
            "BF16, F16 or F32. Convert them to BF16 first."
        )
    for key in specs:
        weight = _weight_key_of_scales(key, specs)
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


def _find_format(key: str, specs: Mapping[str, TensorSpec]) -> _QuantisedFormat | None:
    """The format of the quantised weight ``key``; None if the tensor ``key`` is no
    quantised weight. ``specs``: the tensors of the files."""
    spec = specs[key]
    module, _, name = key.rpartition(".")
    prefix = f"{module}." if module else ""
    if name == "qweight":  # of an AWQ or GPTQ folder
        scales_key = _key_if_stored(f"{prefix}scales", specs)
        # only GPTQ has g_idx, and may leave it out
        if f"{prefix}g_idx" in specs:
            return _QuantisedFormat("GPTQ", scales_key)
        return _QuantisedFormat("AWQ or GPTQ", scales_key)
    if name == "weight_packed":  # of compressed-tensors
        scales_key = _key_if_stored(f"{prefix}weight_scale", specs)
        if spec.dtype != "U8":
            return _QuantisedFormat("packed INT4 or INT8", scales_key)
        if f"{prefix}weight_global_scale" in specs:
            return _QuantisedFormat("NVFP4", scales_key)
        return _QuantisedFormat("MXFP4", scales_key)
    if name.endswith("_blocks") and spec.dtype == "U8":
        scales_key = _key_if_stored(f"{key.removesuffix('blocks')}scales", specs)
        if scales_key is None:
            return None
        return _QuantisedFormat("MXFP4", scales_key)
    scales_key = _key_if_stored(f"{key}_scale_inv", specs)
    if scales_key is None:
        scales_key = _key_if_stored(f"{key}_scale", specs)
    if spec.dtype in _FP8_DTYPES and _weight_key_of_scales(key, specs) is None:
        name = _fp8_format_name(spec, scales_key, specs)
        return _QuantisedFormat(name, scales_key)
    if spec.dtype == "I8":
        if scales_key is None:
            scales_key = _key_if_stored(f"{prefix}SCB", specs)  # of bitsandbytes
        if scales_key is None:
            return None
        return _QuantisedFormat("INT8", scales_key)
    if spec.dtype == "U8" and f"{key}_scale_2" in specs:
        return _QuantisedFormat("NVFP4", scales_key)
    if spec.dtype == "U8" and f"{key}.absmax" in specs:
        return _QuantisedFormat("4-bit of bitsandbytes", f"{key}.absmax")
    return None


def _key_if_stored(key: str, specs: Mapping[str, TensorSpec]) -> str | None:
    """``key`` if ``specs`` has such a tensor, else None."""
    if key in specs:
        return key
    return None


def _fp8_format_name(
    spec: TensorSpec, scales_key: str | None, specs: Mapping[str, TensorSpec]
) -> str:
    """The name of the FP8 format of the weight ``spec``, by the dtype and the shape of
    its scales; ``scales_key``: the key of the scales, or None."""
    if scales_key is None:
        return "FP8"
    scales = specs[scales_key]
    if scales.dtype in _POWER_OF_TWO_DTYPES:
        return "MXFP8"
    # A weight is [rows, columns], or [experts, rows, columns]: compare without experts.
    leading_dims = max(len(spec.shape) - 2, 0)
    scales_shape = scales.shape[leading_dims:]
    rows = spec.shape[leading_dims:-1]
    if scales_shape in ((), (1,)):
        return "per-tensor FP8"
    if scales_shape in (rows, rows + (1,)):
        return "per-channel FP8"
    return "block-scaled FP8"


def _weight_key_of_scales(key: str, specs: Mapping[str, TensorSpec]) -> str | None:
    """The key of the weight whose scales are the tensor ``key``; None if the tensor
    ``key`` holds no scales."""
    module, _, name = key.rpartition(".")
    if name in _NAMES_OF_SCALES:
        return f"{module}.weight"
    for suffix in _SUFFIXES_OF_SCALES:
        weight = key.removesuffix(suffix)
        if name == f"weight{suffix}" or (weight != key and weight in specs):
            return weight
    return None
