"""Which rule a Kimi Delta Attention takes."""

import pytest
import torch

from megatron_gdn.ops.kda.rule import resolve
from megatron_gdn.ops.kda.rule.plain import PlainKDA
from megatron_gdn.ops.kda.rule.resolve import resolve_kda

GPU = {"device": "cuda", "dtype": torch.bfloat16, "key_dim": 128}


def test_auto_is_plain_torch_where_fla_could_run(monkeypatch):
    """Until the laws of fla's kernels have run on a GPU."""
    monkeypatch.setattr(resolve, "_why_not_fla", lambda *_: None)
    choice = resolve_kda("auto", **GPU)
    assert type(choice.rule) is PlainKDA and "backend='fla'" in choice.reason
    assert resolve_kda("fla", **GPU).rule.name == "fla"


@pytest.mark.parametrize(("given", "said"), [
    ({"deterministic": True}, "by timing"), ({"aligned": True}, "batch_invariant_mode"),
])  # fmt: skip
def test_fla_is_refused_by_name_where_bits_are_promised(given, said):
    with pytest.raises(ValueError, match=said):
        resolve_kda("fla", **GPU, **given)
    assert type(resolve_kda("auto", **GPU, **given).rule) is PlainKDA
