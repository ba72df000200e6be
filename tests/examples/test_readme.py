"""The README's code runs: its Python, and its launches as far as megatron-core's wheel has them."""

import math
import re
import shlex

import pytest

from tests.examples import readme_laws as laws
from tests.examples.conftest import EXAMPLES

README = (EXAMPLES.parent / "README.md").read_text()
HYBRID = ["GatedDeltaNet"] * 3 + ["TorchSelfAttention"]


def blocks(language: str = "") -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [code for written_in, code in fenced if written_in == language]


def words_of(block: str) -> list[str]:
    return shlex.split(block.replace("\\\n", " "))


def launches() -> dict[str, list[str]]:
    """The flags of each whole launch, by the script that takes them."""
    found = {}
    for words in map(words_of, (b for b in blocks() if "pretrain_" in b and "--spec" in b)):
        (at,) = (i for i, word in enumerate(words) if word.endswith(".py"))
        found[words[at]] = words[at + 1 :]
    return found


def changed_lines() -> list[list[str]]:
    """The flags that a launch which exists is given, block by block."""
    return [words_of(b) for b in blocks() if b.lstrip().startswith("--spec")]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["pretrain_hybrid.py", "pretrain_gpt.py"])
def test_a_launch_is_parsed_built_and_trained(pools, script):
    for mixers, loss, missing in pools(2).run(laws.launch, script, launches()[script]):
        assert [name for name in mixers if name != "IdentityOp"] == HYBRID * 2
        # An untrained model knows nothing of 256 tokens.
        assert loss == pytest.approx(math.log(256), rel=0.1) and missing == 0


def test_the_lines_that_change_are_those_of_the_launches():
    hybrid, gpt = changed_lines()
    for script, flags in (("pretrain_hybrid.py", hybrid), ("pretrain_gpt.py", gpt)):
        whole = launches()[script]
        assert flags == whole[: len(flags)]


def test_the_python_runs(pools):
    """All but what tests/hf runs: folders in test_checkpoints.py, `patch` in drop_in."""
    elsewhere = ("HF_FOLDER", "patch(model)")
    code = [block for block in blocks("python") if not any(x in block for x in elsewhere)]
    (names,) = pools(1).run(laws.run_code, code)
    assert names["mixer"] == "ModuleSpec" and names["model"] == "HybridModel"
