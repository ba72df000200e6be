"""The sections of a projection row.

They define which columns each rank has, and the keys of checkpoints.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class SizeError(ValueError, AssertionError):
    """Raised if sizes do not fit each other, or ranks cannot share them evenly.

    It is also an AssertionError, since Megatron's and Automodel's mixers raise an
    AssertionError for wrong sizes.
    """


def require_sizes(dims: DataclassInstance, may_be_zero: Container[str] = ()) -> None:
    """Raise a ValueError unless each field of ``dims`` is an int of at least 1; a field
    that ``may_be_zero`` names may be 0."""
    for field in fields(dims):
        size = getattr(dims, field.name)
        if field.name in may_be_zero:
            least = 0
        else:
            least = 1
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(
                f"{field.name}={size!r} is not a size; it must be an integer of at "
                f"least {least}."
            )


def require_shares(ranks: int, counts: Sequence[int], description: str) -> None:
    """Raise an error unless ``ranks`` divides all ``counts``; ``description`` names the
    counts in the error."""
    if ranks < 1 or any(count % ranks for count in counts):
        most = max(counts)
        legal = [
            n for n in range(1, most + 1) if not any(count % n for count in counts)
        ]
        raise SizeError(
            f"tensor_model_parallel_size={ranks} cannot split {description} evenly; "
            f"use one of {', '.join(map(str, legal))}."
        )


class Section(NamedTuple):
    """Neighbouring columns of a projection row: ``width`` columns for each head of one
    kind."""

    name: str  # the section's name in checkpoints
    # the kind of its heads, such as "key" or "value"; the heads lie side by side
    head_kind: str
    width: int  # columns per head
    conv: bool = False  # whether the columns are inputs of the causal convolution
    # whether the columns are gates. Gates are never quantised, and a separate product
    # may compute them.
    gates: bool = False
    # The name of the run of sections that this section belongs to, or "". The sections
    # of a run are neighbours of one shape. Ranks and checkpoints split each section by
    # itself; a front may read the run as one section, with the heads of all sections of
    # the run.
    run_name: str = ""


@dataclass(frozen=True)
class Layout:
    """The sections of a projection row, and how many heads of every kind a row has.

    Each head of the first kind has a recurrent state: it is a *state head*. A head of
    another kind serves one or more neighbouring state heads. All heads of one kind
    serve equally many.
    """

    sections: tuple[Section, ...]  # in storage order; convolved sections are neighbours
    # the kinds of heads, each with the number of its heads; the state heads first
    head_counts: tuple[tuple[str, int], ...]
    # the name of the section with the output gate, as wide as a row for out_proj
    output_gate: str = "z"

    def __post_init__(self) -> None:
        """Assert that convolved sections are neighbours, that gates come last, and that
        each run has neighbours of one shape."""
        convolved = [section.conv for section in self.sections]
        if any(convolved):
            first = convolved.index(True)
        else:
            first = 0
        count = sum(convolved)
        assert all(convolved[first : first + count]), (
            "convolved sections must be neighbours"
        )
        gates = [section.gates for section in self.sections]
        assert gates == sorted(gates), "the rule's gates must come last"
        for run, members in self._runs.items():
            first = self.sections.index(members[0])
            neighbours = list(self.sections[first : first + len(members)])
            shapes = {(x.head_kind, x.width, x.conv) for x in members}
            assert neighbours == members and len(shapes) == 1, (
                f"the sections of run {run} must be neighbours of one shape"
            )

    def heads(self, kind: str) -> int:
        """The number of heads of this kind."""
        return dict(self.head_counts)[kind]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(section.name for section in self.sections)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """For each section and run, the number of heads and the columns of a head."""
        shapes = {x.name: (self.heads(x.head_kind), x.width) for x in self.sections}
        for run, members in self._runs.items():
            heads, width = shapes[members[0].name]
            shapes[run] = len(members) * heads, width
        return shapes

    @cached_property
    def _runs(self) -> dict[str, list[Section]]:
        """The sections of each run, by the run's name."""
        runs: dict[str, list[Section]] = {}
        for section in self.sections:
            if section.run_name:
                runs.setdefault(section.run_name, []).append(section)
        return runs

    def shape_of(self, name: str) -> tuple[int, int]:
        """The number of heads of a section or run, and the columns of each head."""
        return self._shapes[name]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of every section, for ``Tensor.split``."""
        return tuple(
            self.heads(section.head_kind) * section.width for section in self.sections
        )

    @cached_property
    def width(self) -> int:
        return sum(self.widths)

    @cached_property
    def _columns(self) -> dict[str, slice]:
        """For each section and run, the slice of its columns."""
        ends = list(accumulate(self.widths))
        columns = dict(zip(self.names, map(slice, [0, *ends], ends), strict=True))
        for run, members in self._runs.items():
            first, last = members[0].name, members[-1].name
            columns[run] = slice(columns[first].start, columns[last].stop)
        return columns

    def columns(self, name: str) -> slice:
        """The slice of a row with the columns of the section or run ``name``."""
        return self._columns[name]

    @cached_property
    def gate_columns(self) -> slice:
        """The slice of a row with the output gate."""
        return self.columns(self.output_gate)

    @cached_property
    def main_width(self) -> int:
        """The number of columns of all sections that are not gates; the gates come
        last."""
        pairs = zip(self.sections, self.widths, strict=True)
        return sum(width for section, width in pairs if not section.gates)

    @property
    def heads_text(self) -> str:
        """The numbers of heads as text, for error messages."""
        # Mamba2's kinds are "head" and "group", other mixers' are "key" and "value".
        words = {"head": "heads", "group": "groups"}
        return " and ".join(
            f"{n} {words.get(kind, f'{kind} heads')}" for kind, n in self.head_counts
        )

    @cached_property
    def mixed_width(self) -> int:
        """The number of columns of a row that out_proj takes."""
        return self.gate_columns.stop - self.gate_columns.start

    @cached_property
    def conv_names(self) -> tuple[str, ...]:
        """The names of the convolved sections."""
        return tuple(section.name for section in self.sections if section.conv)

    @cached_property
    def conv_widths(self) -> tuple[int, ...]:
        """The number of columns of each convolved section."""
        pairs = zip(self.sections, self.widths, strict=True)
        return tuple(width for section, width in pairs if section.conv)

    @cached_property
    def conv_width(self) -> int:
        """The number of channels of the convolution."""
        return sum(self.conv_widths)

    @cached_property
    def conv_columns(self) -> slice:
        """The slice of a row that holds the convolution's channels."""
        names = self.conv_names
        return slice(self.columns(names[0]).start, self.columns(names[-1]).stop)

    @property
    def state_heads(self) -> int:
        """The number of heads with a recurrent state."""
        return self.head_counts[0][1]

    def shares_among(self, ranks: int) -> bool:
        """Whether :meth:`share` can give every rank an equal number of state heads."""
        return self.state_heads % ranks == 0 and all(
            count % ranks == 0 or ranks % count == 0
            for _, count in self.head_counts[1:]
        )

    def why_not_share(self, ranks: int) -> str | None:
        """Why ``ranks`` ranks cannot share the heads, with the legal numbers; None if
        they can."""
        if ranks >= 1 and self.shares_among(ranks):
            return None
        legal = [n for n in range(1, self.state_heads + 1) if self.shares_among(n)]
        return (
            f"context_parallel_size={ranks} cannot share the {self.heads_text} of a "
            f"tensor-parallel rank evenly; use one of {', '.join(map(str, legal))}."
        )

    def share(self, ranks: int) -> Layout:
        """The layout on one of ``ranks`` ranks, which share the H state heads equally.

        Rank r gets state heads ``[r H / ranks, (r + 1) H / ranks)`` and the heads that
        serve these state heads. A head that serves state heads of several ranks is on
        all of these ranks.

        Raises:
            ValueError: ``ranks`` does not divide the state heads, or on some rank two
                heads of one kind would serve unequal numbers of state heads; the
                message lists the legal sizes.
        """
        why = self.why_not_share(ranks)
        if why is not None:
            raise SizeError(why)
        counts = ((kind, max(1, count // ranks)) for kind, count in self.head_counts)
        return replace(self, head_counts=tuple(counts))

    def copies(self, ranks: int) -> tuple[int, ...]:
        """For each section, how many ranks hold the same columns after :meth:`share`:
        more than 1 if there are fewer heads than ``ranks``."""
        return tuple(
            max(1, ranks // self.heads(section.head_kind)) for section in self.sections
        )


def layout_of_in_proj(dims: Any) -> Layout:
    """The layout of in_proj's rows: ``dims.in_proj_layout`` if it exists, else
    ``dims.layout``.

    In Kimi Delta Attention other linears than in_proj make some columns of a row.
    """
    return getattr(dims, "in_proj_layout", dims.layout)
