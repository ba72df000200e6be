"""Run on every rank: functions of this package that a steady forward calls."""

import importlib.util
from pathlib import Path
from types import ModuleType

from tests.parallel import parallel


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "count_calls.py"
    spec = importlib.util.spec_from_file_location("count_calls", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark


def steady_way(cp: int, mode: str, packed: bool) -> tuple[int, dict[str, int]]:
    """How many calls it makes beside the plain arithmetic, and all of them."""
    with parallel(cp=cp):
        way = _benchmark().steady_way(cp, mode, packed)
        return way.own, way.entries
