"""Parses the commands' options without torch; suggests right names in place of wrong
ones."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

MOST_HEADS = MOST_HEAD_DIM = 2**14  # the largest numbers that commands take
MOST_RANKS = 2**10


class Parser(argparse.ArgumentParser):
    """Parses a command's options, which may not be abbreviated; prints errors in one
    line."""

    def __init__(self, prog: str, **settings: Any) -> None:
        """``prog``: the command's name in its messages; ``settings``: as for
        ``ArgumentParser``."""
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog=prog, allow_abbrev=False, **settings)

    def parse_known_args(
        self, args: Iterable[str] | None = None, *others: Any, **named: Any
    ) -> tuple[Any, list[str]]:
        """Parse ``args`` as argparse does; store ``args`` for suggestions."""
        if args is None:
            self._given = sys.argv[1:]
        else:
            self._given = list(args)
        return super().parse_known_args(self._given, *others, **named)

    def error(self, message: str) -> NoReturn:
        """Print argparse's ``message`` with a suggestion, and exit with status 2."""
        said = one_line(f"{message}{self._suggestion(message)}")
        self.exit(2, f"error: {said} (see --help)\n")

    def _suggestion(self, message: str) -> str:
        """``; did you mean X?`` for the wrong option or value in ``message``, or an
        empty text."""
        if wrong := re.search(
            r"invalid choice: '([^']*)' \(choose from (.*)\)", message
        ):
            return did_you_mean([wrong[1]], re.findall(r"[\w.-]+", wrong[2]))
        known = self._options()
        words = [
            word.partition("=")[0] for word in self._given if word.startswith("--")
        ]
        return did_you_mean([word for word in words if word not in known], known)

    def _options(self) -> list[str]:
        """Options that ``--help`` shows, such as ``--tokens``, here and in
        subcommands."""
        choices = (
            action.choices
            for action in self._actions
            if action.nargs == argparse.PARSER
        )
        commands = [
            command for each in choices for command in dict(each or {}).values()
        ]
        return [
            name
            for parser in (self, *commands)
            for name, action in parser._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]


def heads(text: str) -> tuple[int, int]:
    """The numbers of key heads and of value heads in ``text``, which is
    ``KEY:VALUE``."""
    key, _, value = text.partition(":")
    try:
        numbers = whole_number(key, MOST_HEADS), whole_number(value, MOST_HEADS)
    except argparse.ArgumentTypeError:
        numbers = 2, 1
    if numbers[1] % numbers[0]:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not KEY:VALUE, such as 16:32; key heads must divide "
            f"value heads, of which there are at most {MOST_HEADS}"
        )
    return numbers


def whole_number(text: str, most: int = 2**31 - 1) -> int:
    """The whole number in ``text``, from 1 to ``most``."""
    # int() takes no more than some thousand digits, and the number of digits bounds the
    # number.
    plain = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not plain or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a whole number from 1 to {most}"
        )
    return int(text)


def _shown(text: str) -> str:
    """``text`` for a message, cut if it is long."""
    if len(text) <= 40:
        return text
    return f"{text[:40]}..."


def did_you_mean(given: Iterable[str], known: Iterable[str]) -> str:
    """``; did you mean X, Y?``: the ``known`` words nearest to ``given``; "" if none is
    near."""
    known = list(known)
    near = [
        match for word in given for match in difflib.get_close_matches(word, known, 1)
    ]
    if near:
        return f"; did you mean {', '.join(near)}?"
    return ""


def one_line(text: object) -> str:
    """``text`` with its control characters escaped.

    A name that comes from a file, a folder or another process can then neither begin a
    line of its own nor control the terminal.
    """
    characters = str(text)
    if characters.isprintable():
        return characters
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in characters)


def print_error(error: BaseException | str) -> int:
    """Print the error as one line on standard error, and return the exit status 2."""
    print(f"error: {one_line(error)}", file=sys.stderr)
    return 2
