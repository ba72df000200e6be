"""A pytest plugin for `benchmarks/sanitize.py`: which kernels of ours a run launched.

The file that ``SANITIZE_FOUND`` names gets the kernels and the numbers of tests.
"""

import json
import os
from collections import Counter
from pathlib import Path

_launched: set[str] = set()
_outcomes: Counter[str] = Counter()


def pytest_collection_finish():
    from megatron_gdn.ops.kernels.launch import Launch

    make = Launch.__init__
    launch = Launch.__call__
    names: dict[int, str] = {}

    def noted_make(self, kernel, *numbers, **constants):
        make(self, kernel, *numbers, **constants)
        names[id(self)] = kernel.__name__

    def noted_launch(self, *tensors):
        _launched.add(names[id(self)])
        launch(self, *tensors)

    Launch.__init__ = noted_make
    Launch.__call__ = noted_launch


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.outcome] += 1


def pytest_sessionfinish():
    found = {"launched": sorted(_launched), **_outcomes}
    Path(os.environ["SANITIZE_FOUND"]).write_text(json.dumps(found))
