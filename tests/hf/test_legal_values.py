"""Which values each field of a config.json may have: as its words say, and as before."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_gdn.hf.config_fields import FIELD_TABLE, check_config

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


def _elements(words):
    """Elements that a list of these may have, and others."""
    if found := re.fullmatch(r"whole numbers from (\d+)", words):
        low = int(found[1])
        return [low, low + 1], [low - 1, True, str(low), low + 0.0, None]
    if words == "texts":
        return ["", "a"], [1, None, ["a"]]
    return re.findall("'(.*?)'", words), ["others", 1, None]


def _values(words):
    """Values that these words allow, and others."""
    if words.startswith("a list of "):
        legal, others = _elements(words.removeprefix("a list of "))
        lists = [[], legal, tuple(legal), *([x] for x in legal)]
        return lists, [*([x] for x in others), [*legal, others[0]], *legal, {}, None]
    if found := re.fullmatch(r"1 to (\d+) of the symbols (.*)", words):
        symbols = re.findall("'(.*?)'", found[2])
        text = "".join(symbols)
        longest = symbols[0] * int(found[1])
        return [*symbols, text, longest], ["", text + "X", longest + "M", symbols, None]
    if words == "an object":
        return [{}, {"a": 1}], [[], "a", 1, None]
    legal = [json.loads(x.replace("'", '"')) for x in words.split(" or ")]
    others = [
        None,
        "other",
        2,
        1.0,
        0.0,
        [1],
        {},
        [0, 1],
        [1, math.inf],
        [False, math.inf],
        [0],
    ]
    others += [False, True, 0, 1, 3, 5]
    written = [json.dumps(x) for x in legal]
    return [x for x in legal if x is not None], [
        x for x in others if json.dumps(x) not in written
    ]


@pytest.mark.parametrize("name", [name for name, found in NUMBERS.items() if not found])
def test_other_values_are_legal_as_the_words_say(name):
    field = FIELD_TABLE[name]
    legal, others = _values(field.legal_values)
    assert [x for x in legal if not field.is_legal(x)] == []
    assert [x for x in others if field.is_legal(x)] == []


def test_an_attribute_that_is_none_counts_as_absent():
    check_config(SimpleNamespace(rms_norm_eps=None), ["rms_norm_eps", "hidden_size"])
    with pytest.raises(ValueError, match="a SimpleNamespace: rms_norm_eps=0 is not"):
        check_config(SimpleNamespace(rms_norm_eps=0), ["rms_norm_eps"])


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}: {text}\n" for name, text in words().items()))
