"""Cases by their names.

A name has words in any order; what it does not say is the benchmark's own:

    8x4096           8 rows of 4096 tokens
    thd32768         documents of unequal lengths, one for each 1024 tokens, in one row
    thd8192-16       16 documents of unequal lengths
    thd8192x512      documents of 512 tokens each
    thd8192~512      documents of log-normal lengths with this median
    thd100,63,1      documents of these lengths
    16/32 h2048 n2   key and value heads, hidden size, updates per token
    te slow          Transformer Engine's linears; states that live over 4,096 tokens
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

LINEARS = ("local", "te")
GATES = ("fast", "slow")


@dataclass(frozen=True)
class Case:
    """A batch, and the sizes that its name says.

    Attributes:
        lengths: of documents packed in one row; None for rows of one sequence each.
        sizes: ``heads``, ``hidden`` and ``updates``, where the name has them.
    """

    name: str
    batch: int = 1
    tokens: int = 0
    lengths: tuple[int, ...] | None = None
    linears: str = "local"
    gates: str = "fast"
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def offsets(self) -> list[int] | None:
        if self.lengths is None:
            return None
        return [0, *accumulate(self.lengths)]


def parse(name: str, smaller: int = 1, multiple: int = 1) -> Case:
    """The case of this name.

    Args:
        smaller: divides all numbers of tokens.
        multiple: documents of one length, or log-normal ones, are multiples of it.
    """
    found: dict[str, Any] = {"sizes": {}}
    for word in name.split():
        if word in LINEARS:
            found["linears"] = word
        elif word in GATES:
            found["gates"] = word
        else:
            for pattern, read in _WORDS.items():
                match = re.fullmatch(pattern, word)
                if match is not None:
                    numbers = [int(x) for x in re.findall(r"\d+", word)]
                    read(found, numbers, smaller, multiple)
                    break
            else:
                raise SystemExit(f"{word!r} of the case {name!r} is no word of a case.")
    if "lengths" in found:
        found["tokens"] = sum(found["lengths"])
    if "tokens" not in found:
        raise SystemExit(f"the case {name!r} does not say how many tokens it has.")
    return Case(name, **found)


def unequal(tokens: int, documents: int) -> tuple[int, ...]:
    """Lengths proportional to 1, 2, .., N; all but the last end at odd places."""
    total = documents * (documents + 1) // 2
    ends = [i * (i + 1) // 2 * tokens // total | 1 for i in range(1, documents)]
    return tuple(b - a for a, b in pairwise([0, *ends, tokens]))


def log_normal(tokens: int, median: int, multiple: int) -> tuple[int, ...]:
    drawn = random.Random(3)
    lengths = []
    left = tokens
    while left:
        length = round(median * drawn.lognormvariate(0, 1))
        length = min(left, max(1, length // multiple) * multiple)
        lengths.append(length)
        left -= length
    return tuple(lengths)


def _rows(found: dict, numbers: list[int], smaller: int, _: int) -> None:
    found["batch"] = numbers[0]
    found["tokens"] = max(1, numbers[1] // smaller)


def _unequal(found: dict, numbers: list[int], smaller: int, _: int) -> None:
    tokens = numbers[0]
    documents = numbers[1] if len(numbers) > 1 else max(2, tokens // 1024)
    found["lengths"] = unequal(tokens // smaller, documents)


def _equal(found: dict, numbers: list[int], smaller: int, multiple: int) -> None:
    tokens, length = (number // smaller for number in numbers)
    length = max(1, length // multiple) * multiple
    found["lengths"] = (length,) * (tokens // length)


def _log_normal(found: dict, numbers: list[int], smaller: int, multiple: int) -> None:
    tokens, median = (number // smaller for number in numbers)
    found["lengths"] = log_normal(tokens, median, multiple)


def _listed(found: dict, numbers: list[int], smaller: int, _: int) -> None:
    found["lengths"] = tuple(max(1, number // smaller) for number in numbers)


def _size(name: str) -> Callable[[dict, list[int], int, int], None]:
    def read(found: dict, numbers: list[int], _: int, __: int) -> None:
        found["sizes"][name] = numbers if len(numbers) > 1 else numbers[0]

    return read


_WORDS = {
    r"\d+x\d+": _rows,
    r"thd\d+(-\d+)?": _unequal,
    r"thd\d+x\d+": _equal,
    r"thd\d+~\d+": _log_normal,
    r"thd\d+(,\d+)+": _listed,
    r"\d+/\d+": _size("heads"),
    r"h\d+": _size("hidden"),
    r"n\d+": _size("updates"),
}
