"""The commands that README and docs tell a reader to run."""

import re
import shlex
from pathlib import Path

_PROGRAM = re.compile(
    r"(\w+=\S+ )*(make|pip|git|python3?|torchrun|(\./)?\.venv/bin/\w+)( |$)", flags=re.ASCII
)


def commands_of(page: Path) -> list[str]:
    """Every command of a page in the order in which they stand, without comments.

    A command is a line that starts with a program's name (after assignments of variables), in a
    fenced block that is no Python, in an indented block, or between backticks in the text. Lines
    that end in a backslash go on.
    """
    found: list[str] = []
    language: str | None = None  # of the fenced block around the line; None outside
    lines = iter(page.read_text().splitlines())
    for line in lines:
        if line.lstrip().startswith("```"):
            language = line.strip()[3:] if language is None else None
        elif language == "python":
            continue
        elif language is not None or line.startswith("    "):
            while line.endswith("\\"):
                line = line[:-1] + " " + next(lines)
            found += _command(line)
        else:
            for span in re.findall(r"`([^`]+)`", line):
                found += _command(span) if " " in span else []
    return found


def _command(line: str) -> list[str]:
    text = " ".join(re.sub(r"\s#.*", "", line).split())
    return [text] if _PROGRAM.match(text) else []


def flags_of(command: str) -> tuple[int, list[str]]:
    """Number of processes and the script's flags of a launch, by torchrun or by the script."""
    words = shlex.split(command)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    flags = words[script + 1 :]
    if "--nproc-per-node" in flags:
        return int(flags[flags.index("--nproc-per-node") + 1]), flags
    sizes = [w.partition("=")[2] for w in words if w.startswith("--nproc_per_node=")]
    return int(*sizes or [1]), flags


def blocks_of(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page that are written in ``language``."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for written_in, code in fenced if written_in == language]


def words_of(block: str) -> list[str]:
    return shlex.split(block.replace("\\\n", " "))


def launches_of(page: Path) -> dict[str, list[str]]:
    """The flags of each whole launch of a script of Megatron-LM, by the script."""
    found = {}
    for words in map(words_of, (b for b in blocks_of(page) if "pretrain_" in b and "--spec" in b)):
        (at,) = (i for i, word in enumerate(words) if word.endswith(".py"))
        found[words[at]] = words[at + 1 :]
    return found
