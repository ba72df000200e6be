"""Runs a benchmark of the registry (registry.toml): measures, and checks the results.

    python3 benchmarks/run.py                       # what there is
    python3 benchmarks/run.py layer --out results.jsonl
    python3 benchmarks/run.py kda --tiny            # small sizes, also on a CPU
    python3 benchmarks/run.py layer --cases "8/32 h4096 1x16384 te" --layers upstream ours
    torchrun --nproc-per-node 4 benchmarks/run.py parallel

lib/cases.py says how a case is named: any name of that form will do. ``--set`` changes
a value of the registry's row: ``--set hidden=4096 heads=[8,32] core=fla``. Each
measurement is one JSON line as soon as it is made. What fails is a line too, and the
next one is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# PYTHONPATH may name another checkout, whose package is measured then.
sys.path.append(str(HERE.parent))

from lib.clone import take_clone  # noqa: E402


def registry() -> dict[str, dict[str, Any]]:
    """The rows by name; a row takes what it does not say from the row ``like``."""
    rows = tomllib.loads((HERE / "registry.toml").read_text())
    for name, row in rows.items():
        if "like" in row:
            rows[name] = rows[row["like"]] | row
    return rows


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=registry(), help="a row")
    parser.add_argument("--cases", nargs="+", help="in place of the row's")
    parser.add_argument("--layers", nargs="+", help="of the row's; default all")
    parser.add_argument("--repeats", type=int, help="of a timed call")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start nothing new after this"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="print the N longest, too"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="one forward and backward each"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args(argv)
    if args.name is not None:
        row = registry()[args.name]
        unknown = set(args.layers or ()) - set(row.get("layers", {}))
        if unknown:
            legal = ", ".join(row.get("layers", {}))
            parser.error(f"no layers {sorted(unknown)} in {args.name}; it has {legal}")
    return args


def with_settings(row: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """The row with ``KEY=VALUE`` set; a value is read as TOML, or else as text."""
    row = dict(row)
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            row[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            row[key] = text
    return row


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.name is None:
        for name, row in registry().items():
            print(f"{name:16} {row['about']}")
        return 0
    row = with_settings(registry()[args.name], args.set)
    take_clone(row.get("clone", ""))
    # fla hands the delta rule to FlashQLA, if that is installed, unless told not to.
    if "core" in row:
        os.environ["FLA_FLASH_QLA"] = str(int(row["core"] == "flash_qla"))
    os.environ |= row.get("variables", {})

    from lib.session import Session

    session = Session(args.name, row, args)
    module, function = row["run"].split(":")
    getattr(import_module(module), function)(session)
    summary = session.summary()
    if summary:
        session.say(f"\n{summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
