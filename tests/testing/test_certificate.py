"""The certificate of context parallelism: its arithmetic, and a small one whole."""

import json
import math

import pytest
import torch

from megatron_gdn.testing import certificate
from tests.processes import python


def test_a_row_is_what_its_tensors_say():
    """Two tokens of two words; the second's probability falls from 1/2 to 1/4."""
    one = {
        "output": torch.tensor([1.0, -2.0]), "x's gradient": torch.tensor([1.0]),
        "input gradient": torch.tensor([4.0]), "logits": torch.zeros(2, 2),
        "token": torch.tensor([0, 1]),
    }  # fmt: skip
    logits = torch.tensor([[0.0, 0.0], [0.75, 0.25]])
    logits[1] = logits[1].log()
    found = one | {"output": torch.tensor([1.0, -1.9]), "input gradient": torch.tensor([3.0])}
    row = certificate._row("fp32", "headwise", 2, found | {"logits": logits}, one, one)
    assert row.output == pytest.approx(0.05) and row.gradients == 0.25
    assert row.kl == pytest.approx((math.log(0.5 / 0.75) + math.log(0.5 / 0.25)) / 4)
    assert row.ratio_mean == pytest.approx(0.75) and row.ratio_farthest == pytest.approx(0.5)
    assert row.clipped == 0.5


@pytest.mark.parametrize(
    "given, told",
    [
        ("--heads 16", "give key and value heads"),
        ("--cp 2 --lengths 6", "every document must be a multiple of 4"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, given, told):
    with pytest.raises(SystemExit):
        certificate.arguments(given.split())
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_both_schemes_stay_within_rounding_of_one_rank():
    """A share of the bits of one rank: errors against fp64 are those of one rank, twice at most."""
    command = "--heads 2:4 --head-dim 16 --hidden 32 --lengths 160 32 --cp 2 4 --json"
    done = python("-m", "megatron_gdn.testing.certificate", *command.split(), timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * 5
    assert done.stderr == ""
    for row in rows:
        (one,) = (x for x in rows if x["ranks"] == 1 and x["precision"] == row["precision"])
        assert 0 < row["output"] <= 2 * one["output"] and row["gradients"] <= 2 * one["gradients"]
        # fp32: a log-probability off by some hundred roundings; the KL is its square.
        if row["precision"] == "fp32":
            assert row["ratio_farthest"] < 1e-5 and row["kl"] < 1e-10 and not row["clipped"]
