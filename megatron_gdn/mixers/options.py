"""The options of this package that every mixer has, beside Megatron's own arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from ..context_parallel import LinearCpMode, SequenceLayout
from ..context_parallel.agreement import check_ranks_per_machine
from ..context_parallel.layouts import parse_member
from ..ops.rules.base import Rule
from ..ops.rules.choice import require_known
from .loader_layout import AUTO, check_cp_layout

# The parts of a mixer that the backward computes again, for each value of the option
# `recompute`. "qkv" means k and v; q is always computed again. "norm_out" means
# out_proj's input. "rule" means the rule's output, its gates and the inverses of its
# chunks.
RECOMPUTE_LEVELS = {
    "none": frozenset(),
    "light": frozenset({"qkv", "norm_out"}),
    "full": frozenset({"qkv", "norm_out", "rule"}),
}


@dataclass(frozen=True, kw_only=True)
class MixerOptions:
    """How a mixer runs. A mixer with options of its own extends this class.

    A constructor of a mixer takes these options as keywords;
    ``ModuleSpec(params={...})``, the specs, ``MEGATRON_GDN_OPTIONS`` and
    ``patch_megatron`` pass them on.

    Args:
        backend: implementation of the recurrence: ``"reference"`` (plain torch,
            deterministic), ``"fla"``, a name that only this mixer has (``"flash_qla"``,
            ``"cudnn"``), or ``"auto"``. The mixer's ``rule.py`` lists the rules;
            ``"auto"`` takes the first that supports the device and dtype of the rows.
        rule_operands: ``"fp16"`` or ``"bf16"``, the dtype to which the GPU backends
            round operands of products inside a chunk, in a bf16 layer. fp16 is more
            exact, bf16 has the wider range, see :mod:`megatron_gdn.gdn.half`.
            Deterministic mode uses bf16.
        cp_layout: how the data loader cut sequences for context parallelism, see
            :class:`megatron_gdn.context_parallel.SequenceLayout`: ``"zigzag"`` (every
            document by itself), ``"zigzag_buffer"`` (the whole packed buffer) or
            ``"contiguous"``; ``"auto"`` means Megatron's setting, else zigzag, see
            :mod:`megatron_gdn.mixers.loader_layout`. A value that contradicts
            Megatron's setting raises a ValueError.
        linear_cp_mode: ``"headwise"`` (an all-to-all gives a rank all tokens of some
            heads), ``"chunkwise"`` (ranks send states, not activations) or ``"auto"``
            (the cheaper of both for each micro-batch). Default:
            ``config.linear_cp_mode`` if Megatron has this field, else ``"auto"``.
        cp_ranks_per_machine: the number of successive context-parallel ranks that
            NVLink joins; ``linear_cp_mode="auto"`` needs it to estimate costs. The last
            machine may have fewer ranks. None (default): the ranks exchange their
            hosts' names once to find the number.
        recompute: tensors that the backward computes again and the forward does not
            keep: ``"none"``, ``"light"`` (query, key, value, the normed output that
            out_proj reads) or ``"full"`` (also the rule's output and the inverses of
            its chunks). Megatron's ``--recompute-modules gdn_norm_out`` adds the normed
            output; ``gdn`` of newer Megatrons computes the whole layer again.

    Raises:
        ValueError: an illegal value.
    """

    # names of fields of this class that are no options of the mixer
    absent_options: ClassVar[tuple[str, ...]] = ()
    mixer_name: ClassVar[str] = "the mixer"  # the mixer's name in errors
    # the rules whose names are legal for ``backend``; (): every name is legal
    rules: ClassVar[Sequence[type[Rule]]] = ()

    backend: str = "auto"
    rule_operands: str = "fp16"
    cp_layout: str | SequenceLayout = AUTO
    linear_cp_mode: str | LinearCpMode | None = None
    cp_ranks_per_machine: int | None = None
    recompute: str | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError if an option has an illegal value."""
        if self.rules:
            require_known(self.backend, self.mixer_name, self.rules)
        check_cp_layout(self.cp_layout)
        if self.linear_cp_mode is not None:
            parse_member(LinearCpMode, self.linear_cp_mode, "linear_cp_mode")
        check_ranks_per_machine(self.cp_ranks_per_machine)
        if self.recompute is not None and self.recompute not in RECOMPUTE_LEVELS:
            legal = ", ".join(repr(level) for level in RECOMPUTE_LEVELS)
            raise ValueError(
                f"recompute={self.recompute!r} is not known; use one of {legal}."
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The options in ``given``, the keywords of a constructor.

        Raises a TypeError for a keyword that is no option of the mixer.
        """
        unknown = sorted(given.keys() - cls.names())
        if unknown:
            raise TypeError(
                f"unknown arguments {', '.join(unknown)}: beside Megatron's arguments "
                f"this mixer takes the options {', '.join(sorted(cls.names()))}."
            )
        return cls(**given)

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of the options that the mixer has."""
        return frozenset(field.name for field in fields(cls)) - set(cls.absent_options)
