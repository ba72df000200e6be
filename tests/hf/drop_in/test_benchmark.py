"""The benchmark of the drop-in runs from its command."""

import json
import subprocess
import sys

import pytest
import torch

from tests.examples.launching import ROOT


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_the_benchmark_runs_tiny_on_the_cpu():
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_hf_dropin.py", "--tiny"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(records) == 6
    patched = [record for record in records if record["layer"] != "transformers"]
    assert len(patched) == 4
    for record in patched:
        assert record["ms"]["median"] > 0
        # fp32 beside float64: the layer that was timed computes what it should.
        assert all(error < 1e-5 for error in record["error"].values()), record
