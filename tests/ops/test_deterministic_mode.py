"""The mixer under torch.use_deterministic_algorithms, which raises at an op without an
order."""

import pytest
import torch

from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import gated_delta_rule, switches
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainBackward, PlainForward
from megatron_gdn.ops.obstacles import log_obstacle_once
from megatron_gdn.ops.rules.base import Bits
from tests.ops.test_mixer import make_inputs, mixed_by

SIZES = HeadSizes(2, 4, 8, 12)
CHOICE = {
    "device": "cpu",
    "dtype": torch.float32,
    "sizes": SIZES,
    "bits": Bits.DETERMINISTIC,
}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(lengths=None):
    leaves, documents = make_inputs(SIZES, 130, bias=True, lengths=lengths)
    leaves = [x.detach().float().requires_grad_() for x in leaves]
    rule = resolve_rule(**CHOICE).rule
    y = mixed_by(rule, leaves, SIZES, documents)
    return y, *torch.autograd.grad(y.square().sum(), leaves)


def test_the_mixers_own_buffers_are_not_filled_and_the_setting_stays(
    deterministic, monkeypatch
):
    # `tests.filled_memory` keeps it from being switched off in other tests.
    off = switches._ProcessWideSetting(switches._do_not_fill)
    monkeypatch.setattr(switches, "_memory_unfilled", off)
    settings = torch.utils.deterministic
    seen = []
    for stage in (PlainForward, PlainBackward):
        original = stage.run

        def watched(*args, original=original, **options):
            seen.append(settings.fill_uninitialized_memory)
            return original(*args, **options)

        monkeypatch.setattr(stage, "run", watched)
    run()
    assert seen == [False, False]
    assert settings.fill_uninitialized_memory
    with pytest.raises(ValueError):
        resolve_rule("fla", **CHOICE)
    assert settings.fill_uninitialized_memory


def test_the_rule_as_a_function_minds_torchs_switch(deterministic, caplog):
    x = torch.rand(1, 5, 2, 4)
    log_obstacle_once.cache_clear()
    with caplog.at_level("INFO", logger="megatron_gdn.ops"):
        gated_delta_rule(x, x, x, -x[..., 0], x[..., 0])
    assert "Deterministic Gated DeltaNet takes a slower rule" in caplog.text
