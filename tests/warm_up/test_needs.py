"""From a model's file or flags to the heads of one rank."""

import json

import pytest

from megatron_gdn.gdn.sizes import GDNDims
from megatron_gdn.warm_up.__main__ import parse
from megatron_gdn.warm_up.needs import Share, needs_of, read_model, shares_of

DIMS = GDNDims(
    hidden_size=2048, num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128,
    conv_kernel_dim=4,
)  # fmt: skip
CONFIG = {
    "hidden_size": 2048,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
LAUNCH = """
torchrun pretrain_gpt.py --hidden-size 2048 --linear-num-key-heads 16 \\
    --linear-key-head-dim 128 --linear-num-value-heads=32 --linear-value-head-dim 128 \\
    --linear-conv-kernel-dim 4 --tensor-model-parallel-size 2 --context-parallel-size 4
"""


def write(folder, name: str, text: str):
    (folder / name).write_text(text)
    return folder / name


def test_a_config_of_transformers_is_read_nested_or_flat_by_file_or_folder(tmp_path):
    path = write(tmp_path, "config.json", json.dumps(CONFIG))
    assert read_model(path) == read_model(tmp_path) == (DIMS, None, None)
    nested = {"text_config": CONFIG, "vision_config": {"hidden_size": 7}}
    assert read_model(write(tmp_path, "other.json", json.dumps(nested))).dims == DIMS


def test_a_launch_script_and_yaml_name_parallel_sizes_too(tmp_path):
    assert read_model(write(tmp_path, "launch.sh", LAUNCH)) == (DIMS, 2, 4)
    yaml = "\n".join(f"{name}: {size}" for name, size in CONFIG.items())
    found = read_model(write(tmp_path, "a.yaml", yaml + "\ncontext_parallel_size: 8\n"))
    assert found == (DIMS, None, 8)


def test_what_a_file_lacks_or_says_twice_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not name linear_key_head_dim, linear_conv"):
        less = {k: v for k, v in CONFIG.items() if k[-8:] != "head_dim" or "value" in k}
        del less["linear_conv_kernel_dim"]
        read_model(write(tmp_path, "config.json", json.dumps(less)))
    with pytest.raises(ValueError, match="linear_num_key_heads as 16 and as 8"):
        read_model(write(tmp_path, "two.sh", LAUNCH + "--linear-num-key-heads 8"))
    with pytest.raises(ValueError, match="is not JSON"):
        read_model(write(tmp_path, "bad.json", "{"))
    with pytest.raises(FileNotFoundError, match="nowhere.json does not exist"):
        read_model(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("tp", "cp", "mode", "shares"),
    [
        (1, 1, "auto", [Share(16, 32, False)]),
        (4, 1, "auto", [Share(4, 8, False)]),
        (2, 2, "headwise", [Share(4, 8, False)]),
        (2, 2, "chunkwise", [Share(8, 16, True)]),
        (2, 2, "auto", [Share(4, 8, False), Share(8, 16, True)]),
        (1, 64, "auto", [Share(16, 32, True)]),  # more ranks than heads
    ],
)
def test_the_heads_of_a_rank(tp, cp, mode, shares):
    assert shares_of(DIMS, tp, cp, mode) == shares


def test_sizes_that_do_not_divide_are_refused_in_words():
    with pytest.raises(ValueError, match="use one of 1, 2, 4, 8, 16"):
        shares_of(DIMS, tp=3)
    with pytest.raises(ValueError, match="use one of 1, 2, 4, 8, 16, 32"):
        shares_of(DIMS, cp=64, mode="headwise")


def test_flags_go_before_what_the_file_names(tmp_path):
    path = str(write(tmp_path, "launch.sh", LAUNCH))
    assert needs_of(parse(["--config", path, "--cp", "1"])).shares == [Share(8, 16, False)]
    with pytest.raises(ValueError, match="--conv beside --config"):
        needs_of(parse(["--config", path, "--conv", "2"]))
    several = needs_of(parse(["--heads", "16:32", "2:4", "--conv", "3", "--head-dim", "64"]))
    assert [str(share) for share in several.shares] == ["16:32", "2:4"]
    assert several.sizes[2:] == (64, 64) and several.taps == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one of the arguments --config --heads is required"),
        (["--heads", "16"], "16 is not KEY:VALUE"),
        (["--heads", "0:4"], "0:4 is not KEY:VALUE"),
        (["--heads", "1:2", "--tp", "0"], "--tp: 0 is not a whole number of at least 1"),
    ],
)
def test_flags_that_make_no_sense_end_with_a_sentence(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
