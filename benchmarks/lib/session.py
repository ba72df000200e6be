"""What a benchmark is given: its row of the registry, its records, the time left."""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch

from .cases import Case, parse
from .layers import Layer, Sizes
from .measure import append_line, copy_bandwidth, environment, table
from .model import DEVICE


class Session:
    """One run of a benchmark.

    Attributes:
        row: of the registry, with what ``--set`` and ``--tiny`` changed.
        args: the command's options.
        records: those written so far.
        writes: whether this process prints and writes: the first rank does.
    """

    def __init__(
        self, name: str, row: dict[str, Any], args: argparse.Namespace
    ) -> None:
        self.name = name
        self.tiny: dict[str, Any] = row.get("tiny", {}) if args.tiny else {}
        self.row = row | self.tiny
        self.args = args
        self.records: list[dict[str, Any]] = []
        self.writes = True
        self._began = time.monotonic()

    @property
    def measured(self) -> list[str]:
        return self.row.get("measured", [])

    @property
    def repeats(self) -> int:
        if self.args.repeats is not None:
            return self.args.repeats
        return 2 if self.args.tiny else self.row.get("repeats", 20)

    def cases(self, multiple: int = 1) -> list[Case]:
        smaller = self.row.get("smaller", 64) if self.args.tiny else 1
        names = self.args.cases or self.row["cases"]
        cases = [parse(name, smaller, multiple) for name in names]
        if self.args.tiny:
            for case in cases:
                case.linears = "local"
        return cases

    def layers(self) -> list[Layer]:
        """Those of ``--layers`` that this machine can run; it says why it leaves others
        out."""
        rows = self.row["layers"]
        mixer = self.row.get("mixer", "gdn")
        found = []
        for name in self.args.layers or rows:
            layer = Layer.of(name, rows[name])
            why_not = layer.why_not(mixer, self.row.get("clone", ""))
            if why_not:
                self.say(f"{name}: left out, {why_not}")
            else:
                found.append(layer)
        return found

    def sizes(self, case: Case | None = None) -> Sizes:
        """Of the benchmark, or of a case that says its own."""
        names = [each.name for each in fields(Sizes)]
        given = {name: self.row[name] for name in names if name in self.row}
        if case is not None:
            given |= case.sizes | self.tiny
        given["heads"] = tuple(given.get("heads", Sizes.heads))
        return Sizes(**given)

    def say(self, *words: str) -> None:
        if self.writes:
            print(*words, flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self.args.seconds - self.seconds()

    def late(self, what: str) -> bool:
        """Whether the time is over; says what is not begun."""
        if self.left() < 0:
            self.say(f"{what}: not begun, out of time")
            return True
        return False

    @cached_property
    def setting(self) -> dict[str, Any]:
        """What all records have."""
        names = (
            "core",
            "mixer",
            "hidden",
            "heads",
            "lower_bound",
            "configurations",
            "cp",
            "layout",
            "in_a_row",
        )
        found = {name: self.row[name] for name in names if name in self.row}
        found["environment"] = environment()
        found["date"] = datetime.date.today().isoformat()
        if "floor" in self.measured:
            found["copy_TB_s"] = self.bandwidth / 1e12
        return found

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy, read and written."""
        return copy_bandwidth() if DEVICE == "cuda" else 1e10

    def emit(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if not self.writes:
            return
        if self.args.out is not None:
            whole = {"benchmark": self.name, **record, **self.setting}
            append_line(self.args.out, whole)
        shown = [f"{key} {cell(record, key)}" for key in self.columns(record)]
        names = [str(record[key]) for key in ("case", "layer") if key in record]
        failed = record.get("failed", "")
        self.say(*names, *shown, failed, f"at {self.seconds():.0f} s")

    def columns(self, record: dict[str, Any]) -> list[str]:
        """The columns of the registry's row that a record has."""
        return [key for key in self.row.get("columns", []) if key in record]

    def attempt(self, names: dict[str, Any], run: Callable[[], Any]) -> Any:
        """The result of ``run``. None, and a record with the error, if it fails: the
        others are measured all the same."""
        try:
            return run()
        except Exception as error:
            self.say(traceback.format_exc(limit=-4))
            words = f"{type(error).__name__}: {error}"[:300]
            self.emit({**names, "failed": words})
            return None

    def summary(self) -> str:
        """A line for each record, ratios to the first record of its case."""
        keys = self.row.get("columns", [])
        rows = [["case", "layer"]]
        for key in keys:
            rows[0] += [key, ""]
        base: dict[str, dict[str, Any]] = {}
        for record in self.records:
            if "failed" in record or not self.columns(record):
                continue
            case = str(record.get("case", ""))
            first = base.setdefault(case, record)
            cells = [case, str(record.get("layer", ""))]
            for key in keys:
                ratio = value(record, key) / (value(first, key) or math.nan)
                cells.append(cell(record, key))
                cells.append("" if math.isnan(ratio) else f"{ratio:.3f}")
            rows.append(cells)
        return table(rows) if len(rows) > 1 else ""


def value(record: dict[str, Any], key: str) -> float:
    """A number, or the median of times; NaN if the record has neither."""
    found = record.get(key, math.nan)
    if isinstance(found, dict):
        found = found.get("median", math.nan)
    return found if isinstance(found, (int, float)) else math.nan


def cell(record: dict[str, Any], key: str) -> str:
    number = value(record, key)
    if math.isnan(number):
        return str(record.get(key, ""))
    if number and abs(number) < 0.01:
        return f"{number:.1e}"
    return f"{number:.3f}" if abs(number) < 100 else f"{number:.0f}"


def release() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
