"""How the layer hears of deterministic mode, and that its bits then hold under
pressure."""

import pytest
import torch

from benchmarks.lib.repeats import check_repeats, forward_backward
from tests.distributed.layer_laws import build, randomise_, thd
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def torchs_switch():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_config_asks_for_it(log):
    layer = build(make_config(deterministic_mode=True))
    assert layer.backend == "reference"
    assert (
        "delta rule backend 'reference' (deterministic mode; not flash_qla: "
        in log.text
    )


def test_torchs_switch_asks_for_it(log, torchs_switch):
    assert build().backend == "reference"
    assert "(deterministic mode; " in log.text


@pytest.mark.parametrize("recompute", ["none", "light"])
@pytest.mark.parametrize("lengths", [None, (63, 2, 65)], ids=["batch", "packed"])
def test_the_layer_repeats_under_torchs_switch(torchs_switch, lengths, recompute):
    torch.manual_seed(0)
    layer = build(make_config(deterministic_mode=True), recompute=recompute)
    randomise_(layer)
    params = thd(lengths) if lengths else None
    run = forward_backward(
        layer, torch.randn(130, 1, 24), attention_mask=None, packed_seq_params=params
    )
    report = check_repeats(run, 5)
    assert report.equal and len(report.digests) == 2 + len(list(layer.parameters())), (
        report
    )
