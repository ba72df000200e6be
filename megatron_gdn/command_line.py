"""Helpers with which the package's commands read options and print errors; torch is not
imported."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

# the largest numbers that commands take
MOST_HEADS = 2**14
MOST_HEAD_DIM = 2**14
MOST_RANKS = 2**10


class Parser(argparse.ArgumentParser):
    """Parses a command's options, which may not be abbreviated.

    An error message is one line and suggests a known name for each unknown name.
    """

    def __init__(self, prog: str, **settings: Any) -> None:
        """``prog``: the command's name in its messages; ``settings``: as for
        ``ArgumentParser``."""
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog=prog, allow_abbrev=False, **settings)

    def parse_known_args(
        self, args: Iterable[str] | None = None, *others: Any, **named: Any
    ) -> tuple[Any, list[str]]:
        """Parse ``args`` (None: the command line) as argparse does, and store them for
        :meth:`_suggestion`."""
        if args is None:
            self._arguments = sys.argv[1:]
        else:
            self._arguments = list(args)
        return super().parse_known_args(self._arguments, *others, **named)

    def error(self, message: str) -> NoReturn:
        """Print argparse's ``message`` with a suggestion, and exit with status 2."""
        said = one_line(f"{message}{self._suggestion(message)}")
        self.exit(2, f"error: {said} (see --help)\n")

    def _suggestion(self, message: str) -> str:
        """``; did you mean X?`` for the wrong option or value in ``message``, or an
        empty text."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            return did_you_mean([wrong[1]], re.findall(r"[\w.-]+", wrong[2]))
        known = self._options()
        options = [
            argument.partition("=")[0]
            for argument in self._arguments
            if argument.startswith("--")
        ]
        return did_you_mean([name for name in options if name not in known], known)

    def _options(self) -> list[str]:
        """The option names (for example ``--tokens``) in the ``--help`` of this command
        and of its subcommands."""
        parsers: list[argparse.ArgumentParser] = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
        names = []
        for parser in parsers:
            for name, action in parser._option_string_actions.items():
                if action.help != argparse.SUPPRESS:
                    names.append(name)
        return names


def parse_heads(text: str) -> tuple[int, int]:
    """The numbers of key heads and of value heads in ``text``, which is
    ``KEY:VALUE``.

    For any other text raise argparse's ArgumentTypeError, which a `Parser` prints.
    """
    key, _, value = text.partition(":")
    try:
        key_heads = parse_whole_number(key, MOST_HEADS)
        value_heads = parse_whole_number(value, MOST_HEADS)
        is_legal = value_heads % key_heads == 0
    except argparse.ArgumentTypeError:
        key_heads = 0
        value_heads = 0
        is_legal = False
    if not is_legal:
        raise argparse.ArgumentTypeError(
            f"{_shorten_text(text)} is not KEY:VALUE, such as 16:32; key heads must "
            f"divide value heads, of which there are at most {MOST_HEADS}"
        )
    return key_heads, value_heads


def parse_whole_number(text: str, most: int = 2**31 - 1) -> int:
    """The whole number in ``text``, from 1 to ``most``; any other text raises an
    ArgumentTypeError."""
    # int() raises an error for a text of several thousand digits.
    has_few_digits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not has_few_digits or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"{_shorten_text(text)} is not a whole number from 1 to {most}"
        )
    return int(text)


def _shorten_text(text: str) -> str:
    """``text`` for a message, cut if it is long."""
    if len(text) <= 40:
        return text
    return f"{text[:40]}..."


def did_you_mean(given: Iterable[str], known: Iterable[str]) -> str:
    """The text ``; did you mean X, Y?``, with the ``known`` word that is most like each
    word of ``given``; "" if no known word is similar."""
    known = list(known)
    near = []
    for word in given:
        near.extend(difflib.get_close_matches(word, known, 1))
    if near:
        return f"; did you mean {', '.join(near)}?"
    return ""


def one_line(text: object) -> str:
    """``text`` with its control characters escaped.

    So a name from a file, a folder or another process cannot begin a line of its own or
    control the terminal.
    """
    characters = str(text)
    if characters.isprintable():
        return characters
    escaped = []
    for character in characters:
        if character.isprintable():
            escaped.append(character)
        else:
            escaped.append(repr(character)[1:-1])  # such as \n
    return "".join(escaped)


def print_error(error: BaseException | str) -> int:
    """Print the error as one line on standard error, and return the exit status 2."""
    print(f"error: {one_line(error)}", file=sys.stderr)
    return 2
