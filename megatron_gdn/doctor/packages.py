"""Are the machine and its packages such as the layer needs them?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from packaging.requirements import Requirement

from ..ops.obstacles import Obstacle, fla_package, flash_qla_package, installed_version

# Extras of what runs in training; the others are for the project itself.
_EXTRAS = ("fla", "te", "conv1d", "hf")
# Built against a torch: such a package can be installed and not be importable.
_BUILT = {"transformer-engine": "transformer_engine.pytorch", "causal-conv1d": "causal_conv1d"}
_HOPPER = 9


class Finding(NamedTuple):
    """What was found of a package, a rule or a check.

    Attributes:
        state: ``"ok"``; ``"note"``, it works, but slower or with less; ``"wrong"``, it raises or
            computes something wrong.
        text: what was found, and for the other two states what to change.
    """

    subject: str
    state: Literal["ok", "note", "wrong"]
    text: str


def machine() -> Iterator[Finding]:
    torch_is = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        yield Finding("gpu", "ok", f"{torch.cuda.get_device_name()} ({major}.{minor})")
    elif shutil.which("nvidia-smi"):
        why = (
            "torch is built without CUDA" if torch.version.cuda is None
            else "the driver may be too old for it, or CUDA_VISIBLE_DEVICES empty"
        )  # fmt: skip
        yield Finding(
            "gpu", "wrong", f"nvidia-smi is here, and torch {torch_is} sees no GPU: {why}"
        )
    else:
        yield Finding("gpu", "note", "none: everything runs on the CPU, in plain torch")
    yield Finding("torch", "ok", torch_is)


def packages() -> Iterator[Finding]:
    """Each package against the versions that this one asks for, and whether it can be imported."""
    try:
        asked = [Requirement(text) for text in requires("megatron-gdn") or ()]
    except PackageNotFoundError:
        why = "runs from a clone, so versions were not checked; pip install -e . there"
        yield Finding("megatron-gdn", "note", why)
        return
    for extra in (None, *_EXTRAS):
        for requirement in asked:
            marker = requirement.marker
            if (marker is None) == (extra is None) and (
                marker is None or marker.evaluate({"extra": extra or ""})
            ):
                yield _package(requirement, extra)


def _package(asked: Requirement, extra: str | None) -> Finding:
    name, install = asked.name, f'pip install "{asked.name}{asked.specifier}"'
    found = installed_version(name)
    if found is None and extra is None:
        return Finding(name, "wrong", f"is required and not installed; {install}")
    if found is None:
        return Finding(name, "note", f"not installed (pip install 'megatron-gdn[{extra}]')")
    if not asked.specifier.contains(found, prereleases=True):
        # A layer of Megatron's runs without the extra "hf", beside any version of its packages.
        state = "note" if extra == "hf" else "wrong"
        return Finding(name, state, f"{found} is installed, {asked.specifier} works; {install}")
    module = _BUILT.get(name)
    try:
        if module is not None:
            import_module(module)
    except Exception as error:  # a broken build raises what it likes
        return Finding(name, "wrong", f"{found} cannot be imported: {error}; build it for torch "
                       f"{torch.__version__}")  # fmt: skip
    return Finding(name, "ok", found)


def kernels() -> Iterator[Finding]:
    """The packages of the delta rule: known bad versions and pairs.

    Without a GPU they are not used; what would be wrong on a Hopper GPU is a note.
    """
    gpu = torch.cuda.is_available()
    major = torch.cuda.get_device_capability()[0] if gpu else _HOPPER
    triton = installed_version("triton")
    if triton is None:
        yield Finding("triton", "note", "not installed: conv, gates and norm run in plain torch")
    else:
        yield Finding("triton", "ok", triton)
    qla, tilelang = flash_qla_package(), installed_version("tilelang")
    if qla is None and tilelang is None:
        why = "compiles by tilelang, which is not installed; pip install flash-qla brings it"
        qla = Obstacle(f"flash-qla {why}")
    for package, obstacle in (("flash-linear-attention", fla_package(major)), ("flash-qla", qla)):
        found = installed_version(package)
        if obstacle is None:
            yield Finding(f"rule of {package}", "ok", f"{found}, tilelang {tilelang or 'none'}")
        else:
            present = find_spec("fla" if "linear" in package else "flash_qla") is not None
            state = "wrong" if present and gpu else "note"
            where = "" if gpu else "on a Hopper GPU: "
            yield Finding(f"rule of {package}", state, f"{where}{obstacle.why}")
