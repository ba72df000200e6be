"""Which values each field of a config.json may have: as its words say, and as before."""

import re
from pathlib import Path

import pytest

from megatron_gdn.hf.config_fields import FIELD_TABLE

FILE = Path(__file__).with_name("legal_values.txt")
NUMBERS = {
    name: re.fullmatch(
        r"a (whole )?number (from|above) (\S+?),? (?:up )?to (\S+)", field.legal_values
    )
    for name, field in FIELD_TABLE.items()
}


def words():
    return {
        name: f"{field.legal_values}{', a setting' if field.is_setting else ''}"
        for name, field in FIELD_TABLE.items()
    }


def test_legal_values_stay():
    """``python -m tests.hf.test_legal_values`` writes the file."""
    known = dict(line.split(": ", 1) for line in FILE.read_text().splitlines())
    assert words() == known


@pytest.mark.parametrize("name", [name for name, found in NUMBERS.items() if found])
def test_a_number_is_legal_to_its_bounds(name):
    whole, kind, *bounds = NUMBERS[name].groups()
    low, high = (int(x) if whole else float(x) for x in bounds)
    is_legal = FIELD_TABLE[name].is_legal
    assert is_legal(high) and is_legal(low) is (kind == "from")
    beyond = 1 if whole else 1e-6 * high
    assert not is_legal(high + beyond) and not is_legal(low - beyond)
    assert not is_legal(True) and not is_legal(str(high)) and not is_legal(None)
    assert not is_legal(float("nan"))


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}: {text}\n" for name, text in words().items()))
