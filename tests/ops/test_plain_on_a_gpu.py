"""``backend="auto"`` that ends in plain torch on a GPU is told once, with what mends
it."""

import importlib
import sys
import tomllib
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from megatron_gdn.doctor import checks
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import obstacles
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.obstacles import warn_once
from megatron_gdn.ops.rules.base import Bits

pytestmark = pytest.mark.skipif(
    find_spec("flash_qla") is not None, reason="is installed"
)
SIZES = HeadSizes(2, 4, 128, 128)
resolve = partial(resolve_rule, device="cuda", sizes=SIZES)
told = partial(
    pytest.warns, RuntimeWarning, match="34.7 ms.*pip install .flash-qla>=0.1.3"
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    warn_once.cache_clear()


def test_it_is_told_once_in_a_process():
    with told() as found:
        assert resolve(dtype=torch.bfloat16).rule.name == "reference"
        assert (
            "pip install"
            in resolve(dtype=torch.bfloat16, bits=Bits.DETERMINISTIC).reason
        )
    assert len(found) == 1


def test_what_no_package_mends_is_not_told_so():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 'pip install "flash-qla' not in resolve(dtype=torch.float32).reason


def test_doctor_gives_the_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for made in ("_random_inputs", "Documents"):
        monkeypatch.setattr(checks, made, lambda *_: None)
    finding = next(checks.check_rules(SIZES, 100))
    assert finding.state == "note" and obstacles.PLAIN_ON_GPU_WARNING in finding.text


@pytest.mark.parametrize("installed", [None, "fla", "flash_qla"])
def test_enable_tells_it_without_waking_cuda(monkeypatch, installed):
    """A framework may choose the process's GPU later, so only packages are looked
    at."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    monkeypatch.setattr(obstacles, "find_spec", {installed: "a spec"}.get)
    monkeypatch.delitem(sys.modules, "megatron_gdn.enable", raising=False)
    with warnings.catch_warnings(action="error") if installed else told():
        importlib.import_module("megatron_gdn.enable")


def test_the_line_asks_for_what_the_extra_does():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
        "project"
    ]
    extras = project["optional-dependencies"]
    assert extras["hopper"][0] == "megatron-gdn[gpu]" and extras["gpu"] == [
        "megatron-gdn[fla,te]"
    ]
    asked = {Requirement(each) for each in [*extras["hopper"][1:], *extras["fla"]]}
    line = obstacles.PLAIN_ON_GPU_WARNING.partition("pip install ")[2]
    assert {Requirement(each.strip('"')) for each in line.split(" ")} == asked
