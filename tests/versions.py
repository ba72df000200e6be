"""Runs the package with one other version at a time, and writes what came of it.

make test-versions [ROWS="torch==2.7.0 python==3.13"] [CLONES=folder] [SCRATCH=folder]

A row is one package's version in an environment with ``constraints.txt`` for the rest:
the quick tests of some folders and a launch run there, for a line of
``docs/versions.jsonl``. Rows against the bounds of ``pyproject.toml`` run too: that is
how a bound is known to be true. The row ``newest`` has the newest version of every
package, as pip installs them today, and runs every folder.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_gdn.compat.tested import TESTED_VERSIONS

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "versions.jsonl"
PAGE = ROOT / "docs" / "versions.md"
# The ends of each package's versions, and those beside which something broke.
ROWS = [
    *(f"megatron-core=={v}" for v in ("0.17.1", "0.18.0", "0.18.2", "0.19.2")),
    *("megatron-core@main", "megatron-core@dev"),
    *(f"torch=={v}" for v in ("2.7.0", "2.8.0", "2.15.0")),
    *("python==3.13", "python==3.14"),
    *(f"transformers=={v}" for v in ("5.2.0", "5.4.0", "5.16.1", "5.23.0", "5.24.0")),
    "newest",
]
PINNED = "3.12"
NEWEST_PYTHON = "3.13"
# What a package's own requirements move with it, as the constraints begin.
MOVES = {
    "torch": ("torch==", "triton==", "nvidia-", "cuda-"),
    "transformers": ("transformers==", "tokenizers==", "huggingface_hub=="),
    "megatron-core": ("megatron-core==",),
    "python": (),
}
SHOWN = ("torch", "megatron-core", "transformers")
# Folders of tests that a row runs; a row that is not named here runs the first two.
QUICK = ["tests/unit", "tests/layer"]
TESTS = {
    "torch": [*QUICK, "tests/hf", "tests/precision"],
    "transformers": ["tests/hf"],
    "newest": ["tests"],
}
LAUNCH = "tests/examples/test_pretrain_hybrid.py::test_torchrun_launches_the_same_run"
MEGATRON_LM = "https://github.com/NVIDIA/Megatron-LM"


@dataclass(frozen=True, slots=True)
class Row:
    """``package==version``, ``megatron-core@branch``, or ``newest``, which has no
    version."""

    package: str
    version: str
    branch: bool

    @classmethod
    def of(cls, text: str) -> Row:
        if text == "newest":
            return cls(text, "", False)
        found = re.fullmatch(r"(\S+?)(==|@)(\S+)", text)
        package, sign, version = found.groups() if found else ("", "", "")
        if package not in MOVES or (sign == "@" and package != "megatron-core"):
            raise ValueError(
                f"{text} is no row: give package==version with one of "
                f"{', '.join(MOVES)}, megatron-core@branch, or newest"
            )
        return cls(package, version, sign == "@")

    def requirement(self, clones: Path | None) -> str:
        """What the row installs, in place of what ``pyproject.toml`` asks for; "" for
        nothing."""
        if self.package in ("python", "newest"):
            return ""
        if not self.branch:
            return f"{self.package}=={self.version}"
        where = f"git+{MEGATRON_LM}@{self.version}"
        if clones is not None:
            where = f"file://{clones.resolve() / f'mlm-{self.version}'}"
        return f"megatron-core @ {where}"


class Environment:
    """A virtual environment in a folder of its own, with the row's version and the
    pinned rest."""

    def __init__(self, row: Row, folder: Path, clones: Path | None) -> None:
        self.python = folder / "venv" / "bin" / "python"
        pythons = {"python": row.version, "newest": NEWEST_PYTHON}
        uv("venv", "--python", pythons.get(row.package, PINNED), str(folder / "venv"))
        (folder / "constraints.txt").write_text("\n".join(kept_pins(row)))
        (folder / "overrides.txt").write_text(row.requirement(clones))
        # Every folder of tests needs more than two of them.
        extra = "dev" if row.package == "newest" else "test"
        uv(
            "pip",
            "install",
            "--python",
            str(self.python),
            "-r",
            str(ROOT / "pyproject.toml"),
            "--extra",
            extra,
            "--constraint",
            str(folder / "constraints.txt"),
            "--override",
            str(folder / "overrides.txt"),
        )
        # the doctor's tests ask what the installed package requires
        if row.package == "newest":
            uv(
                "pip",
                "install",
                "--python",
                str(self.python),
                "--no-deps",
                "--editable",
                str(ROOT),
            )

    def versions(self) -> dict[str, str]:
        ask = "import platform; print(platform.python_version())"
        ask += "".join(f"; print(version({name!r}))" for name in SHOWN)
        printed = self._run(
            "-c", f"from importlib.metadata import version; {ask}"
        ).stdout
        return dict(zip(("python", *SHOWN), printed.split(), strict=True))

    def pytest(self, *arguments: str) -> tuple[bool, str]:
        """Did it pass, and the line that pytest ends with."""
        done = self._run("-m", "pytest", "-p", "no:cacheprovider", *arguments)
        print(done.stdout[-30000:], flush=True)
        ends = re.findall(
            r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in ", done.stdout, flags=re.M
        )
        return done.returncode == 0, ends[-1] if ends else last_words(done.stderr)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # uv compiles nothing at install: what an import compiles is kept, as pip would
        # have.
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env=kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )


def kept_pins(row: Row) -> list[str]:
    """The lines of ``constraints.txt`` that hold for ``row``; none for the newest
    packages."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if row.package == "newest":
        return []
    return [pin for pin in pins if not pin.startswith(MOVES[row.package])]


def last_words(printed: str) -> str:
    """The last line, without what pytest writes before it and without paths of this
    machine."""
    return re.sub(r"^E\s+| *\(?/\S+", "", printed.strip().splitlines()[-1])


def uv(*arguments: str) -> None:
    """Runs uv, with pyenv's Pythons in its reach; RuntimeError with its last words if
    it fails."""
    root = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    path = os.pathsep.join([*glob.glob(f"{root}/versions/3.*/bin"), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "uv", "--quiet", *arguments],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(last_words(" ".join(done.stderr.split())))


def run(name: str, folder: Path, clones: Path | None) -> dict:
    """One row's line: what was installed, what passed."""
    row = Row.of(name)
    line = {"row": name, "date": str(datetime.date.today())}
    try:
        environment = Environment(row, folder, clones)
    except RuntimeError as error:
        return line | {"result": "not installed", "why": str(error)}
    line |= environment.versions()
    if row.branch and clones is not None:
        git = [
            "git",
            "-C",
            str(clones / f"mlm-{row.version}"),
            "rev-parse",
            "--short=10",
            "HEAD",
        ]
        line["commit"] = subprocess.check_output(git, text=True).strip()
    quick = "not gpu and not nightly and not slow"
    folders = TESTS.get(row.package, QUICK)
    line["folders"] = " ".join(folders)
    passed, line["tests"] = environment.pytest(
        *folders, "-m", quick, "-n", "2", "--dist", "loadfile"
    )
    launched, line["launch"] = environment.pytest(LAUNCH, "-m", "")
    return line | {"result": "green" if passed and launched else "red"}


def recorded() -> list[dict]:
    """The lines of the record, in the order of ``ROWS``."""
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    order = {name: place for place, name in enumerate(ROWS)}
    return sorted(lines, key=lambda line: order.get(line["row"], len(order)))


def record(line: dict) -> None:
    """The line in place of an older one of its row, and the page's table of all."""
    lines = recorded() if RECORD.exists() else []
    lines = [other for other in lines if other["row"] != line["row"]] + [line]
    RECORD.write_text("".join(json.dumps(one) + "\n" for one in lines))
    RECORD.write_text("".join(json.dumps(one) + "\n" for one in recorded()))
    PAGE.write_text(filled(PAGE.read_text(), "versions", table(recorded())))


def sentence() -> str:
    """Which versions were tested, as README and the page of versions say it."""
    named = {
        "python": "Python",
        "flash-linear-attention": "fla",
        "transformer-engine": "Transformer Engine",
    }
    ranges = [
        f"{named.get(package, package)} {tested}"
        for package, tested in TESTED_VERSIONS.items()
    ]
    return f"Tested with {', '.join(ranges)}."


def table(lines: list[dict]) -> str:
    keys = ("folders", "tests", "result", "date")
    head = ["row", *keys]
    rows = [head, ["---"] * len(head)]
    run = {line["row"] for line in lines}
    for line in lines + [
        {"row": name, "result": "not run"} for name in ROWS if name not in run
    ]:
        cells = [line.get(key, "-") for key in keys]
        # How many warnings there were says nothing of the version.
        cells = [re.sub(r", \d+ warnings?", "", cell) for cell in cells]
        rows.append([f"`{line['row']}`{_installed(line)}", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _installed(line: dict) -> str:
    """The versions that a row installed, if its name does not say them."""
    if "commit" in line:
        return f" ({line['megatron-core']})"
    if line["row"] == "newest" and "python" in line:
        versions = [f"{key} {line[key]}" for key in SHOWN]
        return f" (Python {line['python']}, {', '.join(versions)})"
    return ""


def filled(page: str, place: str, text: str) -> str:
    """The page with ``text`` in the marked ``place``."""
    start = f"<!-- {place} -->\n"
    end = f"\n<!-- end of {place} -->"
    return page[: page.index(start) + len(start)] + text + page[page.index(end) :]


def main() -> int:
    """Runs and records rows; returns 1 if a row failed that was not recorded as red
    before."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="package==version")
    parser.add_argument(
        "--clones", type=Path, help="has mlm-main and mlm-dev; else by git"
    )
    parser.add_argument(
        "--scratch", type=Path, help="environments are made and removed in here"
    )
    args = parser.parse_args()
    try:
        for name in args.rows:
            Row.of(name)
    except ValueError as error:  # before the first row is run
        parser.error(str(error))
    known_red = {line["row"] for line in recorded() if line["result"] == "red"}
    failed = []
    for name in args.rows:
        folder = Path(tempfile.mkdtemp(prefix="versions-", dir=args.scratch))
        try:
            line = run(name, folder, args.clones)
        finally:
            shutil.rmtree(folder)
        record(line)
        print(json.dumps(line), flush=True)
        if line["result"] != "green" and name not in known_red:
            failed.append(name)
    if failed:
        print(
            f"These rows failed and were not red before: {', '.join(failed)}",
            file=sys.stderr,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
