import pytest
import torch
from megatron.core import utils

from megatron_gdn.compat.observe import span


@pytest.fixture
def ranges(monkeypatch):
    """Megatron's own NVTX stack with its profiling on; torch's markers need CUDA."""
    monkeypatch.setattr(utils, "_nvtx_enabled", True)
    monkeypatch.setattr(utils, "_nvtx_range_messages", [])
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    return utils._nvtx_range_messages


class Mixer:
    """Its name stands before the range's."""


def test_a_range_is_closed_when_its_body_raises(ranges):
    mixer = Mixer()
    with pytest.raises(KeyError, match="inner"), span(mixer, "mixer"), span(mixer, "in_proj"):
        assert ranges == ["Mixer.mixer", "Mixer.in_proj"]
        raise KeyError("inner")
    assert ranges == []
    with span(mixer, "out_proj"):  # Megatron refuses to close a range that is not the last opened
        assert ranges == ["Mixer.out_proj"]
    assert ranges == []
