"""Options of commands and of the environment: our error in one line, at once, or a
value."""

import contextlib
import io
import string
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks import certificate
from megatron_gdn.command_line import Parser, one_line, parse_heads, parse_whole_number
from megatron_gdn.compat import observe
from megatron_gdn.doctor.__main__ import main as doctor
from megatron_gdn.specs.layer import OPTIONS_VARIABLE, parse_options
from megatron_gdn.warm_up.__main__ import parse as parse_warm_up
from megatron_gdn.warm_up.layers import read_sizes
from tests.searches import examples

QUICK = 10  # seconds, on a busy machine
SHORT = {"max_examples": examples(100), "deadline": None, "derandomize": True}


def refusal(command, *words: str) -> str:
    """What a command prints that refuses its words with the status 2."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit) as end,
    ):
        command(list(words))
    assert end.value.code == 2
    text = said.getvalue()
    assert (
        text.startswith("error: ")
        and text.count("\n") == 1
        and text.strip().isprintable()
    )
    assert len(text) < 600
    return text


HUGE = "1" + "0" * 19
LONG = "9" * 100_000


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "x", "", "²", HUGE, LONG, "nan", "1\n2"]
)
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (doctor, "--head-dim"),
        (doctor, "--tokens"),
        (doctor, "--heads"),
        (parse_warm_up, "--cp"),
        (parse_warm_up, "--tp"),
        (parse_warm_up, "--processes"),
        (parse_warm_up, "--multiprocessors"),
        (parse_warm_up, "--heads"),
        (certificate.parse_arguments, "--cp"),
        (certificate.parse_arguments, "--lengths"),
        (certificate.parse_arguments, "--hidden"),
        (certificate.parse_arguments, "--head-dim"),
    ],
)
def test_a_number_that_no_option_takes_is_refused_before_any_work(
    command, option, value
):
    given = (
        []
        if command is not parse_warm_up or option == "--heads"
        else ["--heads", "2:4"]
    )
    assert option in refusal(command, *given, f"{option}={value}")


def test_more_ranks_than_anybody_has_are_refused_at_once():
    began = time.monotonic()
    assert "from 1 to 1024" in refusal(
        parse_warm_up, "--heads", "2:4", "--cp", "1000000"
    )
    assert time.monotonic() - began < QUICK


@pytest.mark.parametrize(
    "text", ["0:0", "0:2", "2:3", "4:2", "1:", ":1", "1:2:4", f"1:{HUGE}"]
)
def test_heads_that_are_none_are_refused(text):
    assert "KEY:VALUE" in refusal(doctor, f"--heads={text}")


@settings(**SHORT)
@given(st.text(max_size=60))
@example("٣")  # a decimal digit of another script
@example("1_0")
def test_any_text_is_a_number_or_is_refused(text):
    parser = Parser("x")
    parser.add_argument("--number", type=parse_whole_number)
    parser.add_argument("--heads", type=parse_heads)
    for option in ("--number", "--heads"):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                found = vars(parser.parse_args([f"{option}={text}"]))[option[2:]]
            except SystemExit:
                assert said.getvalue().count("\n") == 1
                continue
        assert all(
            0 < number < 2**31 for number in (found if option == "--heads" else [found])
        )


WORDS = [
    "backend",
    "recompute",
    "deterministic",
    "linear_cp_mode",
    "{",
    "[]",
    ":1}",
    "-",
    "(",
    "=",
]
PIECES = st.sampled_from(
    [*WORDS, *string.punctuation, " ", ",", "\n", "True", "None", "1e999"]
)


@settings(**SHORT)
@given(st.lists(PIECES, max_size=30).map("".join))
@example("recompute={[]:1}")
@example("recompute=" + "-" * 1900)
@example("recompute=" + "(" * 1900)
@example("recompute=" + "9" * 1900)
@example(" " * 100_000)
@example("recompute=light" + " " * 100_000)
@example("recompute=light" + " ," * 900 + "x")
@example("\ud800=1")
def test_any_text_is_options_or_is_refused(text):
    began = time.monotonic()
    try:
        parse_options(text)
    except ValueError as error:
        assert str(error).startswith(OPTIONS_VARIABLE) and len(str(error)) < 2000
        assert "\n" not in str(error)
    assert time.monotonic() - began < QUICK


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
@pytest.mark.parametrize("value", ["abc", "", " 1", "-1", "9" * 100, "1\n", "²"])
def test_a_rank_that_is_no_number_stops_no_log_line(name, value, monkeypatch, caplog):
    for each in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    with caplog.at_level("INFO"):
        observe.log_single_rank(observe.logger, 20, "told")
    assert "told" in caplog.text
    monkeypatch.setenv(name, "1")
    observe.log_single_rank(observe.logger, 40, "of rank 1")
    assert "of rank 1" not in caplog.text


def test_a_log_line_is_one_line(caplog):
    observe.log_single_rank(observe.logger, 40, "a\nERROR: b \x1b[31m c %s")
    (record,) = caplog.records
    assert record.getMessage() == r"a\nERROR: b \x1b[31m c %s"
    assert one_line("Grüße, 世界") == "Grüße, 世界"


SIZES = "linear_num_key_heads: 2\nlinear_num_value_heads: 4\nlinear_key_head_dim: 8\n"
REST = "linear_value_head_dim: 8\nlinear_conv_kernel_dim: 4\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SIZES.replace("2", HUGE) + REST, "linear_num_key_heads"),
        (SIZES.replace("2", LONG) + REST, "linear_num_key_heads"),
        (SIZES.replace("2", "0") + REST, "linear_num_key_heads"),
        (SIZES + REST + f"context_parallel_size: {HUGE}", "context_parallel_size"),
        (SIZES.replace(": 2", " " * 100_000) + REST, "linear_num_key_heads"),
        ("\x00\xff", "linear_num_key_heads"),
        (SIZES + SIZES.replace("2", "7") + REST, "keep one"),
    ],
    ids=["huge", "long", "zero", "ranks", "spaces", "binary", "twice"],
)
def test_a_file_of_sizes_is_read_or_refused_at_once(text, told, tmp_path):
    path = tmp_path / "launch.sh"
    began = time.monotonic()
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=told) as error:
        read_sizes(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 600
    assert time.monotonic() - began < QUICK
