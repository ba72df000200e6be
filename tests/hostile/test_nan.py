"""Wherever a maximum decides, NaN fails: the doctor, the certificate, and their
statuses."""

import json
import math

import pytest
import torch

from benchmarks import certificate
from megatron_gdn.doctor import checks
from megatron_gdn.ops.delta_rule.base import HeadSizes

SMALL = HeadSizes(1, 2, 8, 12)
TENSORS = ("o", "dq", "dk", "dv", "dg", "dbeta")


class Other(checks.PlainRule):
    """Another rule than the plain one."""


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_rule_with_nan_in_any_tensor_is_wrong(tensor, number, monkeypatch):
    run = checks._run_rule

    def faulty(rule, inputs, documents):
        made = run(rule, inputs, documents)
        if type(rule) is Other:
            made[tensor].view(-1)[-1] = number
        return made

    choice = checks.resolve_rule(device="cpu", dtype=torch.float32, sizes=SMALL)
    monkeypatch.setattr(checks, "_run_rule", faulty)
    monkeypatch.setattr(
        checks, "resolve_rule", lambda **_: choice._replace(rule=Other())
    )
    found = {each.subject: each for each in checks.check_rules(SMALL, 70)}
    assert found["rule, errors"].state == "wrong"
    assert found["rule, errors"].text.startswith(tensor)


def test_plain_torch_with_nan_is_wrong(monkeypatch):
    run = checks._run_rule

    def faulty(rule, inputs, documents):
        made = run(rule, inputs, documents)
        if inputs.q.dtype == torch.float32:
            made["dg"].fill_(math.nan)
        return made

    monkeypatch.setattr(checks, "_run_rule", faulty)
    found = {each.subject: each for each in checks.check_rules(SMALL, 70)}
    assert found["rule, errors"].state == "wrong"


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_tensor_that_is_exactly_zero_is_no_fault(tokens):
    """One token has no gradient of its decay, so its relative error would be 0 / 0."""
    found = {each.subject: each for each in checks.check_rules(SMALL, tokens)}
    assert {each.state for each in found.values()} == {"ok"}
    assert "nan" not in found["rule, errors"].text


def results(gradients):
    """What the certificate knows of one case, with these gradients of three
    parameters."""
    made = {
        f"{name}'s gradient": torch.tensor([x, 1.0]) for name, x in gradients.items()
    }
    logits = torch.arange(8.0).view(2, 4)
    return made | {
        "output": torch.ones(2),
        "logits": logits,
        "token": torch.tensor([1, 2]),
    }


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_worst_gradient_of_the_certificate_is_nan_if_one_is(place):
    exact = results(dict.fromkeys("abc", 1.0))
    found = results(
        {name: math.nan if n == place else 1.5 for n, name in enumerate("abc")}
    )
    row = certificate._make_row("fp32", "headwise", 2, found, exact, exact)
    assert math.isnan(row.gradients)


def test_a_ratio_that_is_nan_is_not_inside_the_clip():
    exact = results({"a": 1.0})
    row = certificate._make_row(
        "fp32",
        "headwise",
        2,
        exact | {"logits": torch.full((2, 4), math.nan)},
        exact,
        exact,
    )
    assert row.clipped == 1 and math.isnan(row.ratio_farthest) and math.isnan(row.kl)


@pytest.mark.parametrize("given", [[], ["--json"]])
def test_a_certificate_with_nan_ends_with_an_error(given, monkeypatch, capsys):
    good = certificate.Row("fp32", "headwise", 2, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    rows = [good]
    monkeypatch.setattr(certificate, "certificate", lambda args: rows)
    assert certificate.main(given) == 0
    rows.append(good._replace(gradients=math.nan))
    assert certificate.main(given) == 1
    printed = capsys.readouterr()
    assert "NaN or infinite" in printed.err
    if given:
        lines = [json.loads(line) for line in printed.out.splitlines()]
        assert math.isnan(lines[-1]["gradients"])
