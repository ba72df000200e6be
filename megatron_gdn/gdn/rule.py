"""Implementations of the delta rule for the mixer, and the choice among them.

Which kernels deterministic mode may use: those that were seen to repeat, and nothing else.

A kernel's source shows whether it has atomics or timed choices, but not whether it has a race. So
every entry below was tested with ``benchmarks/bench_determinism.py`` on that GPU: hundreds of
forward and backward passes in two processes, over poisoned memory and beside a competing stream,
with every bit of the output and of every gradient equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops.delta_rule.base import HeadSizes, RuleGrads, RuleInputs
from ..ops.delta_rule.plain import PlainRule
from ..ops.obstacles import (
    FLA_IS_TIMED,
    Obstacle,
    installed_version,
    say_once,
    told_of_plain,
    why_not_fla,
    why_not_flash_qla,
    why_not_heads,
)
from ..ops.rules.base import Rule
from ..ops.rules.choice import ON_GRID, Choice, why_not_aligned
from .half import HalfOperands

__all__ = ["RULES", "Choice", "Rule", "RuleGrads", "RuleInputs", "resolve_rule"]

RULES = ("flash_qla", "fla", "reference")
OPERANDS = ("fp16", "bf16")


def _make(name: str, deterministic: bool = False) -> Rule:
    if name == "flash_qla":
        from .flash_qla.rule import FlashQlaRule

        # Its usual plan cuts a sequence depending on the others of the batch.
        return FlashQlaRule(batch_invariant=True) if deterministic else FlashQlaRule()
    if name == "fla":
        from .fla import FlaRule

        return FlaRule()
    return PlainRule()


def resolve_rule(
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    sizes: HeadSizes,
    deterministic: bool = False,
    operands: str = "fp16",
    normalise_qk: bool = True,
) -> Choice:
    """Choose the delta rule of the mixer, from shapes, dtype and architecture alone.

    Args:
        backend: ``"flash_qla"``, ``"fla"``, ``"reference"`` (plain torch), or ``"auto"``: the
            first of these that fits; if that is not the first one, the log says why, once. A name
            that is not ``"auto"`` is never replaced by another.
        deterministic: results repeat bit for bit, from run to run and process to process, and a
            sequence's results do not depend on the others of its batch. ``"auto"`` then takes
            flash_qla where it was tested for that (see :mod:`.rule`), else the reference.
            fla is refused, since it picks its kernels by timing. flash_qla may be asked for by
            name where it was not tested; the log then says so.
        operands: the dtype to which flash_qla and fla round operands of products in a bf16 layer:
            ``"fp16"``, or ``"bf16"`` with three bits less and more range (see :mod:`.half`). If
            fp16 would be more exact but cannot be used, ``reason`` says so.
        normalise_qk: whether q and k have unit length; fp16 operands need that.

    Raises:
        ValueError: an unknown name, or one that these sizes, this dtype, device or
            ``deterministic`` rule out.
        ImportError: the backend's package is missing, too old, or known to compute wrong results
            here.
    """
    if operands not in OPERANDS:
        raise ValueError(
            f"unknown rule_operands {operands!r} of the delta rule; use 'fp16' or 'bf16'."
        )
    choice = _choose(backend, torch.device(device), dtype, sizes, deterministic)
    if operands == "bf16" or choice.rule.name == "reference" or dtype != torch.bfloat16:
        return choice  # asked for, or no less exact than fp16
    why = _why_not_half(choice.rule, normalise_qk)
    if why is None:
        return Choice(HalfOperands(choice.rule), f"{choice.reason}; fp16 operands")
    return choice._replace(reason=f"{choice.reason}; no fp16 operands: {why}")


def _why_not_half(rule: Rule, normalise_qk: bool) -> str | None:
    """Why a rule keeps its operands in bf16; None if they become fp16."""
    if rule.batch_invariant:
        return "what they round depends on all documents of a batch, which deterministic mode bars"
    if not normalise_qk:
        return "without unit length, q and k may leave the range of fp16"
    return None


def _choose(
    backend: str, device: torch.device, dtype: torch.dtype, sizes: HeadSizes, deterministic: bool
) -> Choice:
    if backend not in ("auto", *RULES):
        raise ValueError(
            f"unknown backend {backend!r}; use 'auto' or one of "
            f"{', '.join(repr(name) for name in RULES)}."
        )
    if backend == "auto":
        if deterministic:
            return _deterministic_choice(device, dtype, sizes)
        return _first_that_fits(device, dtype, sizes)
    if backend == "fla" and deterministic:
        raise ValueError(
            f"backend='fla': {FLA_IS_TIMED}; in deterministic mode use 'auto', 'flash_qla' or "
            f"'reference'."
        )
    obstacle = _obstacle(backend, device, dtype, sizes)
    if obstacle is not None:
        raise obstacle.error(f"backend={backend!r}: {obstacle.why}.")
    reason = "requested"
    if backend == "flash_qla" and deterministic:
        untested = why_not_repeatable(backend, device, dtype, sizes)
        if untested is not None:
            reason = f"requested; {untested}"
            say_once(f"Deterministic Gated DeltaNet: {untested}.", device.type)
    return Choice(_make(backend, deterministic), reason)


def _obstacle(
    name: str, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
) -> Obstacle | None:
    """Why a rule cannot run here, every requirement checked; None if it can."""
    if name == "flash_qla":
        obstacle = why_not_flash_qla(device, dtype, sizes.key_dim, sizes.value_dim)
        heads = why_not_heads("flash_qla", sizes.value_heads)
        return Obstacle(heads) if obstacle is None and heads is not None else obstacle
    return why_not_fla(device, dtype, sizes.key_dim) if name == "fla" else None


def _first_that_fits(device: torch.device, dtype: torch.dtype, sizes: HeadSizes) -> Choice:
    passed = {}
    for name in RULES:
        obstacle = _obstacle(name, device, dtype, sizes)
        if obstacle is None:
            break
        passed[name] = obstacle
    why = "; ".join(f"not {other}: {obstacle.why}" for other, obstacle in passed.items())
    if passed:
        say_once(f"Gated DeltaNet takes a slower delta rule, {name!r} ({why}).", device.type)
    if name == "reference":
        why += told_of_plain(device, *passed.values())
    return Choice(_make(name), why or f"{dtype} heads of 128 on this GPU")


def _deterministic_choice(device: torch.device, dtype: torch.dtype, sizes: HeadSizes) -> Choice:
    obstacle = _obstacle("flash_qla", device, dtype, sizes)
    untested = why_not_repeatable("flash_qla", device, dtype, sizes)
    why = untested if obstacle is None else obstacle.why
    if why is None:
        known = find_repeatable("flash_qla", device, dtype, sizes)
        assert known is not None
        return Choice(_make("flash_qla", True), f"deterministic mode; {known.evidence}")
    if device.type == "cuda":
        say_once(f"Deterministic Gated DeltaNet takes the plain-torch rule ({why}).", device.type)
    why += told_of_plain(device, obstacle)
    return Choice(_make("reference"), f"deterministic mode; not flash_qla: {why}")


def _aligned_choice(device: torch.device, dtype: torch.dtype, sizes: HeadSizes) -> Choice:
    device = torch.device(device)
    known = find_repeatable("flash_qla", device, dtype, sizes)
    if known is None or _obstacle("flash_qla", device, dtype, sizes) is not None:
        return Choice(PlainRule(aligned=True), ON_GRID)
    from .flash_qla.rule import FlashQlaRule

    return Choice(FlashQlaRule(aligned=True), ON_GRID)


def choose_rule(
    backend: str,
    sizes: HeadSizes,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    *,
    operands: str,
    normalise_qk: bool,
    aligned: bool = False,
) -> Choice:
    """:func:`resolve_rule` for a layer, which learns device and dtype last.

    Args:
        aligned: training and generation give a token the same bits, see :mod:`..ops.aligned`.

    Raises:
        ValueError: ``aligned`` with a kernel's name as ``backend``; and as `resolve_rule`.
    """
    if aligned:
        why = why_not_aligned(backend)
        if why is not None:
            raise ValueError(why)
        if backend == "reference":
            return Choice(PlainRule(aligned=True), ON_GRID)
        return _aligned_choice(device, dtype, sizes)
    return resolve_rule(
        backend, device=device, dtype=dtype, sizes=sizes, deterministic=deterministic,
        operands=operands, normalise_qk=normalise_qk,
    )  # fmt: skip


class Repeatable(NamedTuple):
    """One combination that repeats bit for bit."""

    backend: str
    capability: tuple[int, int]
    versions: dict[str, str]  # of the packages that hold and compile the kernels
    dtypes: tuple[torch.dtype, ...]
    value_heads_per_key_head: tuple[int, ...]
    evidence: str  # said in the log


REPEATABLE: tuple[Repeatable, ...] = (
    Repeatable(
        "flash_qla", (9, 0), {"flash-qla": "0.1.3", "tilelang": "0.1.15"}, (torch.bfloat16,),
        (1, 2, 4),
        "2 x 200 repeats of 8192 tokens were equal on an H200",
    ),
)  # fmt: skip


def why_not_repeatable(
    backend: str, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
) -> str | None:
    """Why deterministic mode does not take ``backend`` here; None when it was seen to repeat."""
    known = find_repeatable(backend, device, dtype, sizes)
    if known is not None:
        return None
    return (
        f"{backend} was not tested for repeatability with {dtype}, {sizes.key_heads} key and "
        f"{sizes.value_heads} value heads on this GPU with the installed versions"
    )


def find_repeatable(
    backend: str, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
) -> Repeatable | None:
    """The entry of ``REPEATABLE`` that covers this combination; None if there is none."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    ratio = sizes.value_heads // sizes.key_heads
    for known in REPEATABLE:
        if (
            (known.backend, known.capability) == (backend, capability)
            and all(installed_version(name) == v for name, v in known.versions.items())
            and dtype in known.dtypes
            and ratio in known.value_heads_per_key_head
        ):
            return known
    return None
