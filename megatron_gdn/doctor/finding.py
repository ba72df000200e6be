"""One line of what the doctor found."""

from __future__ import annotations

from typing import Literal, NamedTuple


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
