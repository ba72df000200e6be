"""What stands for some versions of Megatron alone is behind a gate, and goes with them."""

import re
from pathlib import Path

import megatron.core
import pytest

import megatron_gdn
from megatron_gdn.compat import versions
from megatron_gdn.compat.tested import TESTED
from megatron_gdn.compat.versions import Gate
from megatron_gdn.ops.obstacles import version_tuple

GATES = {name: gate for name, gate in vars(versions).items() if isinstance(gate, Gate)}
PACKAGE = Path(megatron_gdn.__file__).parent


@pytest.mark.parametrize("name", GATES)
def test_a_gate_is_needed_by_a_tested_version(name):
    """Else the code behind it goes, and the gate."""
    until = GATES[name].until
    assert until is None or version_tuple(until) > version_tuple(
        TESTED["megatron-core"].oldest
    )


@pytest.mark.parametrize("name", GATES)
def test_code_stands_behind_every_gate(name):
    files = [f for f in PACKAGE.rglob("*.py") if f.name != "versions.py"]
    assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files)


@pytest.mark.parametrize(
    ("version", "is_open"), [("0.18.2", True), ("0.19.0", False), ("0.20.0rc1", False)]
)
def test_a_gate_is_open_before_its_version(monkeypatch, version, is_open):
    monkeypatch.setattr(megatron.core, "__version__", version)
    assert versions.MUON_KNOWS_ATTENTION_ALONE.is_open() == is_open
    assert versions.STRIDES.is_open()
