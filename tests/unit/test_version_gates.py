"""Code for faults of some versions of Megatron goes with these versions."""

import re
from pathlib import Path

import megatron.core
import pytest

import megatron_gdn
from megatron_gdn.compat import versions
from megatron_gdn.compat.tested import TESTED_VERSIONS
from megatron_gdn.compat.versions import UpstreamFault
from megatron_gdn.ops.obstacles import version_tuple

FAULTS = {
    name: fault
    for name, fault in vars(versions).items()
    if isinstance(fault, UpstreamFault)
}
PACKAGE = Path(megatron_gdn.__file__).parent


@pytest.mark.parametrize("name", FAULTS)
def test_a_tested_version_has_the_fault(name):
    """Else the fault and the code that repairs it go."""
    until = FAULTS[name].until
    assert until is None or version_tuple(until) > version_tuple(
        TESTED_VERSIONS["megatron-core"].oldest
    )


@pytest.mark.parametrize("name", FAULTS)
def test_code_reads_every_fault(name):
    files = [f for f in PACKAGE.rglob("*.py") if f.name != "versions.py"]
    assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files)


@pytest.mark.parametrize(
    ("version", "is_present"),
    [("0.18.2", True), ("0.19.0", False), ("0.20.0rc1", False)],
)
def test_a_fault_is_present_before_its_version(monkeypatch, version, is_present):
    monkeypatch.setattr(megatron.core, "__version__", version)
    assert versions.MUON_SPLITS_AS_ATTENTION.is_present() == is_present
    assert versions.STRIDES_IN_FILES.is_present()
