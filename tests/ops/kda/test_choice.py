"""Which rule a Kimi Delta Attention takes."""

import pytest
import torch

from megatron_gdn.ops.kda.rule import cudnn, resolve
from megatron_gdn.ops.kda.rule.plain import PlainKDA
from megatron_gdn.ops.kda.rule.resolve import resolve_kda

GPU = {"device": "cuda", "dtype": torch.bfloat16, "key_dim": 128}


def test_auto_is_fla_where_it_runs(monkeypatch):
    monkeypatch.setattr(resolve, "_why_not_fla", lambda *_: None)
    assert resolve_kda("auto", **GPU).rule.name == "fla"
    monkeypatch.undo()
    choice = resolve_kda("auto", **{**GPU, "device": "cpu"})
    assert type(choice.rule) is PlainKDA and "runs on a GPU" in choice.reason


@pytest.mark.parametrize(("given", "said"), [
    ({"deterministic": True}, "by timing"), ({"aligned": True}, "batch_invariant_mode"),
])  # fmt: skip
def test_fla_is_refused_by_name_where_bits_are_promised(given, said):
    with pytest.raises(ValueError, match=said):
        resolve_kda("fla", **GPU, **given)
    assert type(resolve_kda("auto", **GPU, **given).rule) is PlainKDA


@pytest.mark.parametrize("given", [{"deterministic": True}, {"aligned": True}], ids=str)
def test_cudnn_is_refused_by_name_where_bits_are_promised(given):
    with pytest.raises(ValueError, match="backend='cudnn'"):
        resolve_kda("cudnn", **GPU, **given)


@pytest.mark.parametrize(("changed", "said"), [
    ({"device": "cpu"}, "runs on a GPU, not on cpu"),
    ({"dtype": torch.float16}, "takes bf16, not torch.float16"),
    ({"key_dim": 64}, "takes heads of 128, not 64"),
])  # fmt: skip
def test_cudnn_says_which_heads_it_takes(changed, said):
    with pytest.raises(ValueError, match=f"backend='cudnn'.*{said}"):
        resolve_kda("cudnn", **{**GPU, **changed})


def test_cudnn_is_taken_by_name_alone(monkeypatch):
    monkeypatch.setattr(resolve, "_why_not_fla", lambda *_: None)
    monkeypatch.setattr(resolve, "why_not_cudnn", lambda *_: None)
    assert resolve_kda("cudnn", **GPU).rule.name == "cudnn"
    assert resolve_kda("auto", **GPU).rule.name == "fla"


def test_another_cudnn_frontend_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cudnn, "find_spec", lambda *_: object())
    monkeypatch.setattr(cudnn, "installed_version", lambda *_: "1.31.0")
    cudnn._package.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"1\.31\.0 is not known here \(pip install"):
            resolve_kda("cudnn", **GPU)
    finally:
        cudnn._package.cache_clear()
