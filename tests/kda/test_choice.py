"""Which rule a Kimi Delta Attention takes."""

import pytest
import torch

from megatron_gdn.kda import cudnn
from megatron_gdn.kda import rule as resolve
from megatron_gdn.kda.rule import PlainKDA, choose_kda
from megatron_gdn.ops.state_maps.state_map import StateShape

GPU = {
    "state": StateShape(2, 128, 128), "lower_bound": None, "device": torch.device("cuda"),
    "dtype": torch.bfloat16,
}  # fmt: skip
BOUNDED = {**GPU, "lower_bound": -5.0}


def test_auto_is_fla_where_it_runs(monkeypatch):
    monkeypatch.setattr(resolve, "why_not_fla", lambda *_: None)
    assert choose_kda("auto", **GPU).rule.name == "fla"
    monkeypatch.undo()
    choice = choose_kda("auto", **{**GPU, "device": torch.device("cpu")})
    assert type(choice.rule) is PlainKDA and "runs on a GPU" in choice.reason


@pytest.mark.parametrize(("given", "said"), [
    ({"deterministic": True}, "by timing"), ({"aligned": True}, "batch_invariant_mode"),
])  # fmt: skip
def test_fla_is_refused_by_name_where_bits_are_promised(given, said):
    with pytest.raises(ValueError, match=said):
        choose_kda("fla", **GPU, **given)
    assert type(choose_kda("auto", **GPU, **given).rule) is PlainKDA


@pytest.mark.parametrize("given", [{"deterministic": True}, {"aligned": True}], ids=str)
def test_cudnn_is_refused_by_name_where_bits_are_promised(given):
    with pytest.raises(ValueError, match="backend='cudnn'"):
        choose_kda("cudnn", **BOUNDED, **given)


@pytest.mark.parametrize(("changed", "said"), [
    ({"device": torch.device("cpu")}, "runs on a GPU, not on cpu"),
    ({"dtype": torch.float16}, "takes bf16, not torch.float16"),
    ({"state": StateShape(2, 64, 128)}, "takes heads of 128, not 64"),
    ({"state": StateShape(2, 128, 64)}, "takes heads of 128, not 64"),
    ({"lower_bound": None}, "returns NaN .* gate_lower_bound=None. A layer with .*=-5.0"),
    ({"lower_bound": -6.0}, "returns NaN .* gate_lower_bound=-6.0"),
    ({}, "compute capability 9.0"),
])  # fmt: skip
def test_cudnn_says_what_it_takes(monkeypatch, changed, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    with pytest.raises(ValueError, match=f"backend='cudnn'.*{said}"):
        choose_kda("cudnn", **{**BOUNDED, **changed})


def test_cudnn_is_taken_by_name_alone(monkeypatch):
    monkeypatch.setattr(resolve, "why_not_fla", lambda *_: None)
    monkeypatch.setattr(resolve, "why_not_cudnn", lambda *_: None)
    assert choose_kda("cudnn", **BOUNDED).rule.name == "cudnn"
    assert choose_kda("auto", **GPU).rule.name == "fla"


@pytest.mark.parametrize(("installed", "said"), [
    ("1.31.0", r"1\.31\.0 is not known here \(pip install"), (None, r"not installed \(pip install"),
])  # fmt: skip
def test_another_cudnn_frontend_is_refused_with_what_to_install(monkeypatch, installed, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cudnn, "find_spec", lambda *_: object())
    monkeypatch.setattr(cudnn, "installed_version", lambda *_: installed)
    cudnn._package.cache_clear()
    try:
        with pytest.raises(ImportError, match=said):
            choose_kda("cudnn", **BOUNDED)
    finally:
        cudnn._package.cache_clear()
