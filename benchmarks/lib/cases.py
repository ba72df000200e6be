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
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any


@dataclass
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
    made = Case(name)
    for word in name.split():
        numbers = [int(x) for x in re.findall(r"\d+", word)]
        tokens = [max(1, x // smaller) for x in numbers]
        match re.sub(r"(,?\d+)+", "#", word):
            case "local" | "te":
                made.linears = word
            case "fast" | "slow":
                made.gates = word
            case "#/#":
                made.sizes["heads"] = numbers
            case "h#":
                made.sizes["hidden"] = numbers[0]
            case "n#":
                made.sizes["updates"] = numbers[0]
            case "#x#":
                made.batch = numbers[0]
                made.tokens = tokens[1]
            case "thd#" if len(numbers) > 1:
                made.lengths = tuple(tokens)
            case "thd#":
                made.lengths = unequal(tokens[0], max(2, numbers[0] // 1024))
            case "thd#-#":
                made.lengths = unequal(tokens[0], numbers[1])
            case "thd#x#":
                length = max(1, tokens[1] // multiple) * multiple
                made.lengths = (length,) * (tokens[0] // length)
            case "thd#~#":
                made.lengths = log_normal(tokens[0], tokens[1], multiple)
            case _:
                raise SystemExit(f"{word!r} of the case {name!r} is no word of a case.")
    if made.lengths is not None:
        made.tokens = sum(made.lengths)
    if not made.tokens:
        raise SystemExit(f"the case {name!r} does not say how many tokens it has.")
    return made


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
