import pytest
import torch
from megatron.core import utils

from megatron_gdn.observe import span


@pytest.fixture
def ranges(monkeypatch):
    """Megatron's own NVTX stack with its profiling on; torch's markers need CUDA."""
    monkeypatch.setattr(utils, "_nvtx_enabled", True)
    monkeypatch.setattr(utils, "_nvtx_range_messages", [])
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    return utils._nvtx_range_messages


def test_a_range_is_closed_when_its_body_raises(ranges):
    with pytest.raises(KeyError, match="inner"), span("mixer"), span("in_proj"):
        assert ranges == ["GatedDeltaNet.mixer", "GatedDeltaNet.in_proj"]
        raise KeyError("inner")
    assert ranges == []
    with span("out_proj"):  # Megatron refuses to close a range that is not the last one opened
        assert ranges == ["GatedDeltaNet.out_proj"]
    assert ranges == []
