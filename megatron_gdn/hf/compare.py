"""Compare the weights of two folders or checkpoints tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..mixers.tensor_map import bits_of
from .checkpoint_files import is_checkpoint
from .checkpoint_folder import checkpoint_view
from .safetensors_files import SafetensorsFolder, progress_bar
from .view import HFView


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not equal in bits and dtype."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def open_weights(folder: str | Path, like: str | Path | None = None) -> SafetensorsFolder | HFView:
    """A Hugging Face folder, or a Megatron checkpoint seen as the folder ``like``."""
    if not is_checkpoint(folder):
        return SafetensorsFolder(folder)
    if like is None or is_checkpoint(like):
        raise ValueError(
            f"{folder} is a Megatron checkpoint, which is compared with the Hugging Face folder "
            f"it came from. To compare two checkpoints, export both."
        )
    return checkpoint_view(folder, like)


def compare_folders(
    left: str | Path, right: str | Path, progress: bool = False
) -> Iterator[Difference]:
    """Differences in keys, dtypes, shapes and bits; none means every tensor is the same.

    One of the two may be a Megatron checkpoint; it is compared as the folder that it would export.
    """
    one, other = open_weights(left, right), open_weights(right, left)
    missing = set(other)
    for key in progress_bar([*one], "compare", progress):
        if key not in missing:
            yield Difference(key, f"only in {left}")
            continue
        missing.discard(key)
        a, b = one.spec(key), other.spec(key)
        if a != b:
            yield Difference(key, f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
        elif what := _difference(one.read(key), other.read(key)):
            yield Difference(key, what)
    for key in sorted(missing):
        yield Difference(key, f"only in {right}")


def _difference(a: Tensor, b: Tensor) -> str:
    different = bits_of(a) != bits_of(b)
    if not different.any():
        return ""
    largest = (a.double() - b.double()).abs().max().item()
    return f"{int(different.sum())} of {a.numel()} differ, by at most {largest:.3g}"
