"""The first thing a reader runs works from a fresh process, with plain python."""

import pytest
import torch

from tests.processes import python


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what the CPU prints")
def test_the_quickstart_trains_one_layer_on_packed_documents():
    done = python("examples/quickstart.py")
    assert done.stderr == ""
    first, *gradients = done.stdout.splitlines()
    assert first == "backend reference, output (128, 1, 64), gradients:"
    names = [line.split()[0] for line in gradients]
    parts = ["in_proj", "conv1d", "out_norm", "out_proj"]
    assert names == ["dt_bias", "A_log", *(f"{part}.weight" for part in parts)]
    assert all(float(line.split()[-1]) > 0 for line in gradients)
