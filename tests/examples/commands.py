"""The pages that a reader is given, and the code and commands that are on them."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PROGRAM = re.compile(
    r"(\w+=\S+ )*"
    r"(make|pip|git|test|python3?|torchrun|(\./)?\.venv/bin/\w+)( |$)",
    flags=re.ASCII,
)
_MARKDOWN = MarkdownIt("commonmark").enable("table")


class Block(NamedTuple):
    """A block of code on a page; ``language`` follows the fence, None for an indented
    block."""

    page: Path
    language: str | None
    code: str


def pages(root: Path) -> list[Path]:
    """Every page of a checkout. The ways in come first; CHANGELOG tells of what was."""
    first = [
        root / "README.md",
        root / "docs" / "start.md",
        root / "docs" / "launching.md",
    ]
    more = [
        root / "CONTRIBUTING.md",
        root / "benchmarks" / "README.md",
        root / "tests/README.md",
    ]
    docs = [p for p in sorted((root / "docs").rglob("*.md")) if "_build" not in p.parts]
    return first + [page for page in docs if page not in first] + more


_parse = cache(_MARKDOWN.parse)


def tokens_of(page: Path) -> Iterator[Token]:
    for token in _parse(page.read_text()):
        yield token
        yield from token.children or ()


def blocks_of(*of: Path, language: str | None = "any") -> list[Block]:
    found = []
    for page in of:
        for token in tokens_of(page):
            if token.type == "fence":
                found.append(Block(page, token.info.strip(), token.content))
            elif token.type == "code_block":
                found.append(Block(page, None, token.content))
    return [block for block in found if language in ("any", block.language)]


def commands_of(*of: Path) -> list[str]:
    """Every command of pages in order, with its continuation and without comments."""
    return [line for page in of for line in _shell_of(page) if _PROGRAM.match(line)]


def _shell_of(page: Path) -> Iterator[str]:
    for token in tokens_of(page):
        block = token.type in ("fence", "code_block") and token.info.strip() != "python"
        if block or (token.type == "code_inline" and " " in token.content):
            yield from lines_of(token.content)


def lines_of(code: str) -> list[str]:
    """The lines of a shell's code, each with its continuation, without comments and
    indents."""
    whole = (
        re.sub(r"(^|\s)#.*", "", line)
        for line in code.replace("\\\n", " ").splitlines()
    )
    return [" ".join(line.split()) for line in whole if line.strip()]


def flags_of(command: str) -> tuple[int, list[str]]:
    """Number of processes and the script's flags of a launch, by torchrun or by the
    script."""
    words = shlex.split(command)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    flags = words[script + 1 :]
    if "--nproc-per-node" in flags:
        return int(flags[flags.index("--nproc-per-node") + 1]), flags
    sizes = [w.partition("=")[2] for w in words if w.startswith("--nproc_per_node=")]
    return int(*sizes or [1]), flags


def changed_lines(root: Path) -> list[list[str]]:
    """The flags that a launch which exists is given, block by block."""
    blocks = blocks_of(*pages(root), language="bash")
    return [
        shlex.split(*lines_of(b.code))
        for b in blocks
        if b.code.lstrip().startswith("--spec")
    ]


def launches_of(root: Path) -> dict[str, list[str]]:
    """The flags of each whole launch of a script of Megatron-LM, by the script."""
    found = {}
    for command in commands_of(*pages(root)):
        if "--spec megatron_gdn.specs" in command:
            words = shlex.split(command)
            (at,) = (i for i, word in enumerate(words) if word.endswith(".py"))
            assert words[at] not in found, f"{words[at]} is launched twice on the pages"
            found[words[at]] = words[at + 1 :]
    return found
