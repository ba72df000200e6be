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


def steady_entries(cp: int, mode: str, packed: bool) -> dict[str, int]:
    with parallel(cp=cp):
        return _benchmark().steady_way(cp, mode, packed).entries
