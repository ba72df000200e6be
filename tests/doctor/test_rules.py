"""The doctor tells which rule runs and whether it is exact and repeats; planted faults are seen."""

import json

import pytest
import torch

from megatron_gdn.doctor import checks as rules
from megatron_gdn.doctor.__main__ import main
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule

SMALL = HeadSizes(1, 2, 8, 12)
COMMAND = ["--heads", "1:2", "--head-dim", "8", "--tokens", "70"]


def states(found) -> dict[str, str]:
    return {each.subject: each.state for each in found}


def test_on_a_cpu_the_plain_rule_runs_exact_and_repeats():
    found = list(rules.rules(SMALL, 131))
    assert set(states(found).values()) == {"ok"}
    assert found[0].text.startswith("reference: not flash_qla") and "not fla" in found[0].text
    assert "10 repeats equal in 6 tensors" in found[-1].text


class Worse(PlainRule):
    """Rounds its values to bf16, as the plain rule does not."""


def test_a_rule_that_is_less_exact_than_plain_torch_is_wrong(monkeypatch):
    run = rules.run_rule

    def rounded(rule, inputs, documents, **options):
        if isinstance(rule, Worse):
            inputs = inputs._replace(v=inputs.v.bfloat16().float())
        return run(rule, inputs, documents, **options)

    choice = rules.resolve_rule(device="cpu", dtype=torch.float32, sizes=SMALL)
    monkeypatch.setattr(rules, "run_rule", rounded)
    monkeypatch.setattr(rules, "resolve_rule", lambda **_: choice._replace(rule=Worse()))
    found = {each.subject: each for each in rules.rules(SMALL, 70)}
    assert found["rule, errors"].state == "wrong"
    assert "of plain torch's error against fp64: choose another" in found["rule, errors"].text


def test_a_rule_that_does_not_repeat_is_wrong(monkeypatch):
    run, calls = rules.run_rule, []

    def drifting(rule, inputs, documents, **options):
        out, state = run(rule, inputs, documents, **options)
        calls.append(1)
        return out * (1 + torch.finfo(out.dtype).eps * (len(calls) % 2)), state

    monkeypatch.setattr(rules, "run_rule", drifting)
    assert states(rules.rules(SMALL, 70))["repeats"] == "wrong"


def test_the_command_prints_lines_or_json_and_its_status_says_whether_anything_is_wrong(
    monkeypatch, capsys
):
    assert main(COMMAND) == 0
    assert "ok     repeats" in capsys.readouterr().out
    monkeypatch.setattr(rules, "_parity", lambda subject, *_: rules.Finding(subject, "wrong", ""))
    assert main([*COMMAND, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"subject": "rule", "state": "wrong", "text": ""} in found


def test_heads_that_do_not_divide_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--heads", "3:4"])
    assert "3:4 is not KEY:VALUE" in capsys.readouterr().err
