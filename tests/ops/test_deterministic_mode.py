"""The mixer under torch.use_deterministic_algorithms, which raises at an op without an order."""

import pytest
import torch

from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import Documents, gated_delta_rule
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainBackward, PlainForward
from megatron_gdn.ops.parts import GatedNorm
from tests.gdn_mixer import gated_delta_mixer

SIZES = HeadSizes(2, 4, 8, 12)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(documents=None):
    torch.manual_seed(0)
    leaves = [
        torch.randn(130, 1, SIZES.width),
        torch.randn(SIZES.conv_width, 1, 4) * 0.3,
        torch.zeros(4),
        torch.ones(4),
        torch.ones(12),
    ]
    proj, weight, A_log, dt_bias, gamma = (x.requires_grad_() for x in leaves)
    rule = resolve_rule(device="cpu", dtype=torch.float32, sizes=SIZES, deterministic=True).rule
    y = gated_delta_mixer(
        proj, weight, None, A_log, dt_bias, SIZES,
        rule=rule, norm=GatedNorm(gamma), documents=documents,
    )  # fmt: skip
    return y, torch.autograd.grad(y.square().sum(), [proj, weight, A_log, dt_bias, gamma])


@pytest.mark.parametrize("documents", [None, [0, 63, 64, 130]], ids=["batch", "packed"])
def test_forward_and_backward_run_and_repeat(deterministic, documents):
    if documents is not None:
        documents = Documents.from_cu_seqlens(documents, 130, device="cpu")
    y, grads = run(documents)
    again, grads_again = run(documents)
    assert torch.equal(y, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    assert all(x.isfinite().all() for x in (y, *grads))


def test_the_mixers_own_buffers_are_not_filled_and_the_setting_stays(deterministic, monkeypatch):
    settings = torch.utils.deterministic
    seen = []
    for stage in (PlainForward, PlainBackward):
        original = stage.run

        def watched(*args, original=original, **options):
            seen.append(settings.fill_uninitialized_memory)
            return original(*args, **options)

        monkeypatch.setattr(stage, "run", watched)
    y, _ = run()
    assert seen == [False, False]
    assert settings.fill_uninitialized_memory
    with pytest.raises(ValueError):
        resolve_rule("fla", device="cpu", dtype=torch.float32, sizes=SIZES, deterministic=True)
    assert settings.fill_uninitialized_memory


def test_the_rule_as_a_function_minds_torchs_switch(deterministic):
    x = torch.rand(1, 5, 2, 4)
    with pytest.raises(ValueError, match="by timing"):
        gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], backend="fla")
