"""Generation under FP8 gives linears back as it found them. Megatron's padding is a stand-in here:
its own, and FP8 linears, run in ``tests/gpu/test_fp8_runs.py``.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import fp8_utils
from torch import nn

from megatron_gdn.inference.generate import padded_for_fp8

IN_FP8 = SimpleNamespace(fp8="hybrid", quant_recipe=None)


class Linear(nn.Linear):
    """With what Transformer Engine keeps on a linear, between two micro-batches of training."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.history = torch.arange(3.0)
        self.fp8_meta = {"scaling_fwd": SimpleNamespace(amax_history=self.history)}
        self._fp8_workspaces, self.is_first_microbatch = {"weight": "of the last step"}, False


@pytest.fixture
def padded(monkeypatch):
    wrapped = set()

    def prepare(model):
        for linear in model:
            linear.forward = lambda x: x
            wrapped.add(linear)
            if model.fails:
                raise RuntimeError("no padding")

    monkeypatch.setattr(fp8_utils, "_fp8_inference_wrapped_modules", wrapped, raising=False)
    monkeypatch.setattr(fp8_utils, "prepare_model_for_fp8_inference", prepare, raising=False)
    return wrapped


def model_of(config, fails=False):
    model = nn.Sequential(Linear(), Linear())
    model.config, model.fails = config, fails
    return model


def kept(model):
    return [
        (dict(one._fp8_workspaces), one.is_first_microbatch, one.history.tolist(),
         "forward" in vars(one))
        for one in model
    ]  # fmt: skip


def test_linears_are_padded_inside_and_are_as_before_afterwards(padded):
    model = model_of(IN_FP8)
    before = kept(model)
    with padded_for_fp8(model):
        assert padded == set(model)
        for linear in model:
            assert "forward" in vars(linear) and linear._fp8_workspaces == {}
            linear._fp8_workspaces["weight"], linear.is_first_microbatch = "of now", True
            linear.history.add_(1)
    assert kept(model) == before and not padded


def test_a_padding_that_fails_halfway_leaves_them_as_they_were(padded):
    model = model_of(IN_FP8, fails=True)
    before = kept(model)
    with pytest.raises(RuntimeError, match="no padding"), padded_for_fp8(model):
        pass
    assert kept(model) == before and not padded


def test_a_model_in_bf16_is_not_touched(padded):
    model = model_of(SimpleNamespace(fp8=None, quant_recipe=None))
    with padded_for_fp8(model):
        assert not padded and model[0]._fp8_workspaces
