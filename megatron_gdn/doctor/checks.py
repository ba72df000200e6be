"""The doctor's checks: the machine, packages, kernels, and the rule's errors and
repeats."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from math import inf, isfinite, isnan
from typing import Literal, NamedTuple

import torch
from packaging.requirements import Requirement
from torch import Tensor

from ..compat.tested import why_untested
from ..gdn.api import run_rule
from ..gdn.rule import FlaGDN, resolve_rule
from ..ops.delta_rule.base import HeadSizes, RuleInputs
from ..ops.delta_rule.plain import PlainRule
from ..ops.documents import Documents
from ..ops.obstacles import (
    Obstacle,
    installed_version,
    why_not_fla_package,
    why_not_flash_qla_package,
)
from ..ops.rules.base import Bits, Rule
from ..ops.rules.fla import why_not_callable

# Extras with packages that run in training; the other extras are for developers of this
# project.
_TRAINING_EXTRAS = ("fla", "te", "hf")
_HOPPER_MAJOR = 9  # the major number of Hopper's compute capability
# the rule's output, and the gradients of its inputs
_RESULT_NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
_REPEAT_COUNT = 10


class Finding(NamedTuple):
    """The result of one check; ``--help`` of the command defines the states."""

    subject: str
    state: Literal["ok", "note", "wrong"]
    text: str  # the result, and what to change if the state is not ok


def check_machine() -> Iterator[Finding]:
    """Report the GPU and the CUDA version of torch."""
    torch_version = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        yield Finding("gpu", "ok", f"{torch.cuda.get_device_name()} ({major}.{minor})")
    elif shutil.which("nvidia-smi"):
        if torch.version.cuda is None:
            why = "torch is built without CUDA"
        else:
            why = "the driver may be too old for it, or CUDA_VISIBLE_DEVICES empty"
        text = f"nvidia-smi is here, and torch {torch_version} sees no GPU: {why}"
        yield Finding("gpu", "wrong", text)
    else:
        yield Finding("gpu", "note", "none: everything runs on the CPU, in plain torch")
    yield Finding(
        "cuda", "ok", f"{torch.version.cuda or 'none'}, of torch {torch.__version__}"
    )


def check_packages() -> Iterator[Finding]:
    """Compare installed versions with the tested ones and with the requirements; try
    imports."""
    yield _check_tested("python", platform.python_version())
    try:
        required = [Requirement(text) for text in requires("megatron-gdn") or ()]
    except PackageNotFoundError:
        why = "runs from a clone, so versions were not checked; pip install -e . there"
        yield Finding("megatron-gdn", "note", why)
        return
    for requirement in required:
        if requirement.marker is None:
            yield _check_package(requirement, None)
    for extra in _TRAINING_EXTRAS:
        for requirement in required:
            marker = requirement.marker
            if marker is not None and marker.evaluate({"extra": extra}):
                yield _check_package(requirement, extra)


def _check_package(requirement: Requirement, extra: str | None) -> Finding:
    """Compare the installed version of a package with a ``requirement`` of megatron-gdn.

    ``extra`` is the extra of megatron-gdn with the requirement; None: the package is
    always required.
    """
    name = requirement.name
    install = f'pip install "{name}{requirement.specifier}"'
    installed = installed_version(name)
    if installed is None and extra is None:
        return Finding(name, "wrong", f"is required and not installed; {install}")
    if installed is None:
        return Finding(
            name, "note", f"not installed (pip install 'megatron-gdn[{extra}]')"
        )
    if not requirement.specifier.contains(installed, prereleases=True):
        # Megatron layers do not use the packages of the extra "hf", so their versions
        # may differ.
        state = "note" if extra == "hf" else "wrong"
        text = f"{installed} is installed, {requirement.specifier} works; {install}"
        return Finding(name, state, text)
    try:
        # Transformer Engine is compiled for one torch version, so its import tells more
        # than its version.
        if name == "transformer-engine":
            import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken build may raise any exception
        rebuild = f"build it for torch {torch.__version__}"
        return Finding(
            name, "wrong", f"{installed} cannot be imported: {error}; {rebuild}"
        )
    return _check_tested(name, installed)


def _check_tested(name: str, installed: str) -> Finding:
    """The finding about the package ``name``, whose version ``installed`` should work: a
    note if this version was not tested."""
    why = why_untested(name, installed)
    if why is None:
        return Finding(name, "ok", installed)
    return Finding(name, "note", why)


def check_kernel_versions() -> Iterator[Finding]:
    """Check whether the kernels of fla and FlashQLA can run here.

    Without a GPU the checks assume a Hopper GPU, and report each fault as a note only.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        major = torch.cuda.get_device_capability()[0]
    else:
        major = _HOPPER_MAJOR
    triton = installed_version("triton")
    if triton:
        yield Finding("triton", "ok", triton)
    else:
        yield Finding(
            "triton", "note", "not installed: conv, gates and norm run in plain torch"
        )
    tilelang = installed_version("tilelang")
    why_not_qla = why_not_flash_qla_package()
    if why_not_qla is None and tilelang is None:
        why_not_qla = Obstacle(
            "flash-qla compiles by tilelang, which is not installed; pip install "
            "flash-qla brings it"
        )
    why_not_fla = why_not_fla_package(major)
    if why_not_fla is None:
        # the installed fla may lack functions or arguments that the rule needs
        why = why_not_callable(FlaGDN)
        if why is not None:
            why_not_fla = Obstacle(why)
    for package, module, obstacle in (
        ("flash-linear-attention", "fla", why_not_fla),
        ("flash-qla", "flash_qla", why_not_qla),
    ):
        if obstacle is None:
            text = f"{installed_version(package)}, tilelang {tilelang or 'none'}"
            yield Finding(f"rule of {package}", "ok", text)
            continue
        state = "note"
        if find_spec(module) is not None and has_gpu:
            state = "wrong"
        where = "" if has_gpu else "on a Hopper GPU: "
        yield Finding(f"rule of {package}", state, f"{where}{obstacle.why}")


def check_rules(sizes: HeadSizes, tokens: int) -> Iterator[Finding]:
    """Check the two rules that a layer uses on this machine: the usual rule, and the
    rule of deterministic mode.

    The findings are the choice of each rule, its errors against fp64, and whether the
    deterministic rule repeats its bits. The rules run on two documents, of ``tokens``
    tokens in total, with heads of these ``sizes``.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        device = torch.device("cuda")
        dtype = torch.bfloat16
    else:
        device = torch.device("cpu")
        dtype = torch.float32
    choose = partial(resolve_rule, device=device, dtype=dtype, sizes=sizes)
    choices = {"rule": choose(), "deterministic rule": choose(bits=Bits.DETERMINISTIC)}
    for subject, (rule, reason) in choices.items():
        is_slow = has_gpu and rule.name == "reference"
        yield Finding(subject, "note" if is_slow else "ok", f"{rule.name}: {reason}")
    inputs = _random_inputs(sizes, tokens, device, dtype)
    documents = Documents((0, tokens // 3, tokens), device)
    exact = _run_rule(
        PlainRule(), RuleInputs._make(x.double() for x in inputs), documents
    )
    plain_errors = _rms_errors(_run_rule(PlainRule(), inputs, documents), exact)
    for subject, (rule, _) in choices.items():
        if type(rule) is not PlainRule:
            errors = _rms_errors(_run_rule(rule, inputs, documents), exact)
            yield _compare_errors(subject, errors, plain_errors)
        elif subject == "rule":
            # Plain torch has no other rule to compare with: its errors must be finite.
            worst = _name_of_largest(plain_errors)
            error = plain_errors[worst]
            text = f"{worst} {error:.1e}, of plain torch, against fp64"
            yield Finding("rule, errors", "ok" if isfinite(error) else "wrong", text)
    yield _check_repeats(choices["deterministic rule"].rule, inputs, documents)


def _compare_errors(
    subject: str, errors: dict[str, float], plain: dict[str, float]
) -> Finding:
    """Compare a rule's relative RMS ``errors`` with those of ``plain`` torch.

    The keys of both are the names in _RESULT_NAMES; ``subject`` names the rule.
    """
    subject = f"{subject}, errors"
    ratios = {name: _ratio(errors[name], plain[name]) for name in _RESULT_NAMES}
    worst = _name_of_largest(ratios)
    ratio = ratios[worst]
    text = (
        f"{worst} {errors[worst]:.1e}, {ratio:.2f} of plain torch's error against fp64"
    )
    # Kernels round once more than plain torch, so twice the error of plain torch is ok.
    if ratio <= 2:
        return Finding(subject, "ok", text)
    return Finding(subject, "wrong", f"{text}: choose another backend, and report this")


def _name_of_largest(numbers: dict[str, float]) -> str:
    """The name of the largest of ``numbers``; NaN is larger than every number."""
    return max(numbers, key=lambda name: (isnan(numbers[name]), numbers[name]))


def _ratio(error: float, other: float) -> float:
    """``error / other``; 0 if both are 0, infinite if only ``other`` is 0."""
    if other:
        return error / other
    if error:
        return inf
    return 0.0


def _check_repeats(rule: Rule, inputs: RuleInputs, documents: Documents) -> Finding:
    """Check that _REPEAT_COUNT runs of ``rule`` give equal bits."""
    first = _run_rule(rule, inputs, documents)
    for repeat in range(1, _REPEAT_COUNT):
        results = _run_rule(rule, inputs, documents)
        different = [
            name
            for name in _RESULT_NAMES
            if not torch.equal(first[name], results[name])
        ]
        if different:
            return Finding(
                "repeats", "wrong", f"{', '.join(different)} differ in repeat {repeat}"
            )
    return Finding(
        "repeats",
        "ok",
        f"{_REPEAT_COUNT} repeats equal in {len(_RESULT_NAMES)} tensors",
    )


def _run_rule(
    rule: Rule, inputs: RuleInputs, documents: Documents
) -> dict[str, Tensor]:
    """Run forward and backward of ``rule``; return its output and the gradients of
    ``inputs`` by the names in _RESULT_NAMES. The output's gradient rises from -1 to
    1."""
    leaves = RuleInputs._make(x.detach().requires_grad_() for x in inputs)
    with torch.enable_grad():
        out, _ = run_rule(rule, leaves, documents, use_qk_l2norm_in_kernel=True)
    rising = torch.linspace(-1, 1, out.numel(), dtype=torch.float32, device=out.device)
    d_out = rising.view_as(out).to(out.dtype)
    results = (out.detach(),) + torch.autograd.grad(out, leaves, d_out)
    return dict(zip(_RESULT_NAMES, results, strict=True))


def _rms_errors(
    results: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, float]:
    """The relative RMS error of each tensor in ``results`` against ``exact``, by
    name."""
    errors = {}
    for name, expected in exact.items():
        error = (results[name].double() - expected).norm().item()
        errors[name] = _ratio(error, expected.norm().item())
    return errors


def _random_inputs(
    sizes: HeadSizes, tokens: int, device: torch.device, dtype: torch.dtype
) -> RuleInputs:
    """Random inputs of a rule: one batch row of ``tokens``, with heads of ``sizes``. q, k
    and v have ``dtype``; g and beta are fp32."""
    generator = torch.Generator("cpu").manual_seed(1)

    def random_rows(*shape: int) -> Tensor:
        """Normal random numbers ``[1, tokens, *shape]``."""
        return torch.randn(
            1, tokens, *shape, generator=generator, dtype=torch.float32, device="cpu"
        )

    q = random_rows(sizes.key_heads, sizes.key_dim).to(device, dtype)
    k = random_rows(sizes.key_heads, sizes.key_dim).to(device, dtype)
    v = random_rows(sizes.value_heads, sizes.value_dim).to(device, dtype)
    g = -random_rows(sizes.value_heads).exp().to(device)
    return RuleInputs(q, k, v, g, random_rows(sizes.value_heads).sigmoid().to(device))
