"""The benchmark of the drop-in runs from its command."""

import json

import pytest
import torch

from tests.processes import python


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's smoke check")
def test_the_benchmark_runs_tiny_on_the_cpu():
    said = python("benchmarks/bench_hf_dropin.py", "--tiny").stdout.splitlines()
    records = [json.loads(line) for line in said if line.startswith("{")]
    assert len(records) == 6
    patched = [record for record in records if record["layer"] != "transformers"]
    assert len(patched) == 4
    for record in patched:
        assert record["ms"]["median"] > 0
        # fp32 beside float64: the layer that was timed computes what it should.
        assert all(error < 1e-5 for error in record["error"].values()), record
