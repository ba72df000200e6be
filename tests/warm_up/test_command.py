"""What a run needs compiled, and the command as a whole, short of compiling."""

import json
import os
import shlex
import signal
import sys
import time
import warnings
from functools import partial

import pytest
import torch

from megatron_gdn.gdn.flash_qla.builds import Heads
from megatron_gdn.gdn.sizes import GDNDims
from megatron_gdn.ops import obstacles
from megatron_gdn.ops.kernels.builds import build_lock
from megatron_gdn.warm_up import __main__ as warm_up
from megatron_gdn.warm_up import layers, tasks
from megatron_gdn.warm_up.__main__ import main, parse
from megatron_gdn.warm_up.layers import (
    LayerSizes,
    layer_calls,
    read_sizes,
    sizes_from_options,
)
from megatron_gdn.warm_up.tasks import Task, run_tasks
from tests.examples.commands import commands_of, pages
from tests.gdn.stand_ins import keep_cache_in
from tests.gdn_mixer import gdn_dims
from tests.processes import FORK, PATIENCE, ROOT, fork

DIMS = gdn_dims(64, 16, 32, 128, 128)
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
    assert read_sizes(path) == read_sizes(tmp_path) == (DIMS, 1, 1)
    nested = {"text_config": CONFIG, "vision_config": {"hidden_size": 7}}
    assert read_sizes(write(tmp_path, "other.json", json.dumps(nested))).dims == DIMS


def test_a_launch_script_and_yaml_name_parallel_sizes_too(tmp_path):
    assert read_sizes(write(tmp_path, "launch.sh", LAUNCH)) == (DIMS, 2, 4)
    yaml = "\n".join(f"{name}: {size}" for name, size in CONFIG.items())
    found = read_sizes(write(tmp_path, "a.yaml", yaml + "\ncontext_parallel_size: 8\n"))
    assert found == (DIMS, 1, 8)


def test_what_a_file_lacks_or_says_twice_is_named(tmp_path):
    with pytest.raises(
        ValueError, match="does not name linear_key_head_dim, linear_conv"
    ):
        less = {k: v for k, v in CONFIG.items() if k[-8:] != "head_dim" or "value" in k}
        del less["linear_conv_kernel_dim"]
        read_sizes(write(tmp_path, "config.json", json.dumps(less)))
    with pytest.raises(ValueError, match="linear_num_key_heads as 16 and as 8"):
        read_sizes(write(tmp_path, "two.sh", LAUNCH + "--linear-num-key-heads 8"))
    with pytest.raises(FileNotFoundError, match="nowhere.json does not exist"):
        read_sizes(tmp_path / "nowhere.json")


WHOLE = {"cut", "rows", "uncut"}


@pytest.mark.parametrize(
    ("tp", "cp", "mode", "found"),
    [
        (1, 1, "auto", {(part, 1) for part in WHOLE}),
        (4, 1, "auto", {(part, 1) for part in WHOLE}),
        (2, 2, "headwise", {(part, 2) for part in WHOLE}),
        (2, 2, "chunkwise", {("states", 2)} | {(part, 1) for part in WHOLE}),
        (2, 2, "auto", {("states", 2)} | {(part, 2) for part in WHOLE}),
        # More ranks than heads.
        (1, 64, "auto", {("states", 64)} | {(part, 1) for part in WHOLE}),
    ],
)
def test_the_calls_of_a_rank_and_the_ranks_that_share_one(tp, cp, mode, found):
    calls = layer_calls(LayerSizes(DIMS, tp, cp), mode, None, 132)
    assert {(call.use, call.cp) for call in calls} == found
    for call in calls:
        assert call.tokens % (16 * call.cp * (call.documents or 1)) == 0
        assert (call.rows > 1) == (call.use == "rows")


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("multiprocessors", [66, 114, 132, 148])
def test_documents_and_pieces_of_ranks_reach_each_kernel_that_any_number_reaches(
    tp, multiprocessors, cp
):
    """FlashQLA takes one of three kernels by sequences * heads / multiprocessors. In
    headwise ranks share the heads of documents, in chunkwise each has all of them."""

    def kernel_of(sequences: int, heads: int) -> int:
        share = sequences * heads / multiprocessors / 0.7
        return (share >= 1) + (share >= 0.5)

    for use in ("uncut", "states"):
        calls = layer_calls(LayerSizes(DIMS, tp, cp), "auto", [use], multiprocessors)
        heads = DIMS.num_value_heads // tp
        sequences = [call.documents for call in calls]
        if use == "uncut":
            heads //= cp
        else:
            sequences = [
                n if call.layout == "contiguous" else 2 * n
                for n, call in zip(sequences, calls, strict=True)
            ]
            assert all(call.tokens // call.cp >= 208 for call in calls)  # of a rank
        reached = {kernel_of(n, heads) for n in range(1, multiprocessors)}
        assert {kernel_of(n, heads) for n in sequences} == reached, use


def test_recompute_makes_the_calls_of_training_without_it():
    """What the forward launches a second time depends on the same sizes."""

    def sizes_of(uses: list[str]) -> set:
        calls = layer_calls(LayerSizes(DIMS, 2, 2), "headwise", uses, 132)
        return {call._replace(use="any") for call in calls}

    assert sizes_of(["recompute"]) == sizes_of(["cut", "rows", "uncut"])


class Built(Exception):
    """Ends `run_layer` where it has chosen the layer's options."""


@pytest.mark.parametrize(
    ("use", "cp", "expected"),
    [
        ("cut", 1, {}),
        ("cut", 2, {"linear_cp_mode": "headwise", "cp_layout": "zigzag"}),
        ("rows", 1, {}),
        ("uncut", 1, {}),
        ("states", 1, {"linear_cp_mode": "chunkwise", "cp_layout": "contiguous"}),
        ("whole", 1, {"batch_invariant_mode": True}),
        ("recompute", 1, {"recompute": "full"}),
    ],
)
def test_each_use_runs_a_layer_of_these_sizes_with_the_option_that_needs_its_kernels(
    use, cp, expected, monkeypatch
):
    from megatron.core.transformer import spec_utils

    # Modules that are imported later would keep the function that stands in.
    import megatron_gdn.specs  # noqa: F401

    found = {}

    def build(spec, config, layer_number, pg_collection):
        assert GDNDims.from_config(config) == DIMS
        assert config.tensor_model_parallel_size == pg_collection.tp.size() == 2
        assert config.context_parallel_size == pg_collection.cp.size() == call.cp
        found.update(spec.params)
        if config.batch_invariant_mode:
            found["batch_invariant_mode"] = True
        raise Built

    monkeypatch.setattr(spec_utils, "build_module", build)
    sizes = LayerSizes(DIMS, tp=2, cp=cp)
    call = layer_calls(sizes, "auto", [use], 132)[0]
    with pytest.raises(Built):
        layers.run_layer(sizes, call)
    assert found == expected


def test_sizes_that_do_not_divide_are_refused_in_words():
    with pytest.raises(ValueError, match="use one of 1, 2, 4, 8, 16"):
        layer_calls(LayerSizes(DIMS, 3), "auto", None, 132)
    with pytest.raises(ValueError, match="use one of 1, 2, 4, 8, 16, 32"):
        layer_calls(LayerSizes(DIMS, 1, 64), "headwise", None, 132)


def test_flags_go_before_what_the_file_names(tmp_path):
    path = str(write(tmp_path, "launch.sh", LAUNCH))
    assert sizes_from_options(parse(["--config", path, "--cp", "1"])) == (DIMS, 2, 1)
    assert sizes_from_options(parse(["--heads", "16:32", "--tp", "4"])) == (DIMS, 4, 1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one of the arguments --config --heads is required"),
        (["--heads", "16"], "16 is not KEY:VALUE"),
        (["--heads", "0:4"], "0:4 is not KEY:VALUE"),
        (
            ["--heads", "1:2", "--tp", "0"],
            "--tp: 0 is not a whole number from 1 to 1024",
        ),
    ],
)
def test_flags_that_make_no_sense_end_with_a_sentence(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def touch(path, seconds: float = 0.0) -> bool:
    time.sleep(seconds)
    path.touch()
    return True


def fail() -> bool:
    os.write(1, b"what compilers print\n")
    raise RuntimeError("ptxas says no")


def test_all_are_run_and_a_failure_is_quoted_and_stops_no_other(tmp_path, capfd):
    paths = [tmp_path / str(n) for n in range(5)]
    tasks = [Task(path.name, partial(touch, path)) for path in paths]
    tasks += [Task("bad", fail), Task("there", lambda: False)]
    compiled, failures = run_tasks(tasks, 3)
    assert all(path.exists() for path in paths)
    assert compiled == 5, "not the one that was there"
    ((name, said),) = failures.items()
    assert name == "bad" and "what compilers print" in said
    assert "RuntimeError: ptxas says no" in said
    printed = capfd.readouterr().out
    assert "7 of 7 kernels after " in printed and "compilers" not in printed


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 3), (1000.0, 1)])
def test_a_line_is_printed_after_so_many_seconds_and_at_the_end(
    monkeypatch, capfd, seconds, lines
):
    monkeypatch.setattr(tasks, "_SECONDS_BETWEEN_LINES", seconds)
    run_tasks([Task(name, lambda: True) for name in "abc"], 1)
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == lines and printed[-1].startswith("3 of 3 kernels after ")


def test_one_process_runs_tasks_in_their_order_and_none_are_no_error(tmp_path):
    order = tmp_path / "order"

    def note(name: str) -> bool:
        for text in (name, name.upper()):  # its begin, its end
            with open(order, "a") as file:
                file.write(text)
            time.sleep(0.02)
        return True

    run_tasks([Task(name, partial(note, name)) for name in "dbac"], 1)
    assert order.read_text() == "dDbBaAcC"
    assert run_tasks([], None) == (0, {})


def test_every_task_has_a_process_of_its_own_and_a_crash_stops_no_other(tmp_path):
    def note() -> bool:
        (tmp_path / str(os.getpid())).touch()
        return True

    def crash() -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    tasks = [Task("a", note), Task("crashes", crash), Task("b", note), Task("c", note)]
    compiled, failures = run_tasks(tasks, 1)
    assert (compiled, list(failures)) == (3, ["crashes"])
    assert len(list(tmp_path.iterdir())) == 3


COMMAND = "-m megatron_gdn.warm_up "


def run(*argv: str) -> int:
    """The status of the command in a fork: it hides the GPUs of its process."""
    pytest.importorskip("triton", minversion="3.6")
    process = FORK.Process(target=_exit_with_status, args=(argv,))  # it forks, too
    process.start()
    process.join(300)
    assert process.exitcode is not None
    return process.exitcode


def _exit_with_status(argv: tuple[str, ...]) -> None:
    status = main(argv)
    sys.stdout.flush()
    os._exit(status)


def test_every_command_of_the_docs_is_understood(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "launch.sh").write_text(LAUNCH)
    monkeypatch.chdir(tmp_path)
    commands = [c for c in commands_of(*pages(ROOT)) if COMMAND in c]
    assert len(set(commands)) >= 3
    for command in dict.fromkeys(commands):
        arguments = parse(shlex.split(command.partition(COMMAND)[2]))
        assert layer_calls(
            sizes_from_options(arguments), arguments.linear_cp_mode, arguments.uses, 132
        )


@pytest.mark.parametrize("kernels", ["flash_qla", "triton", "flash_qla triton"])
def test_only_where_flash_qla_is_compiled_must_the_layer_take_it(monkeypatch, kernels):
    pytest.importorskip("triton", minversion="3.6")
    arguments = parse(["--heads", "2:4", "--kernels", *kernels.split()])
    backends = []
    monkeypatch.setattr(
        layers, "run_layer", lambda *_, backend, **options: backends.append(backend)
    )
    heads = Heads(2, 4, torch.float16)
    monkeypatch.setattr(layers, "expected_heads", lambda: heads)
    _, compiled_heads = layers.tasks_of(sizes_from_options(arguments), arguments)
    if "flash_qla" in kernels:
        assert set(backends) == {"flash_qla"} and compiled_heads == {heads}
    else:
        assert set(backends) == {"auto"} and not compiled_heads


@pytest.mark.slow
def test_the_launches_of_a_call_are_noted_by_name_without_a_gpu(tmp_path, capfd):
    """Both ways over two ranks of either mode, with small heads whose rule is plain
    torch here."""
    pytest.importorskip("triton", minversion="3.6")
    process = fork(_print_noted, small(tmp_path, 16))
    process.join(300)
    assert process.exitcode == 0
    names = set(capfd.readouterr().out.split())
    assert {
        "front_forward_kernel",
        "front_backward_kernel",
        "_sum_rows_kernel",
    } <= names
    assert {
        "gated_norm_forward_kernel",
        "gated_norm_backward_kernel",
        "_follow_kernel",
    } <= names
    assert {"lead_in_kernel", "lead_in_backward_kernel", "add_rows_kernel"} <= names
    assert "copy_columns_kernel" in names, "of the exchange of heads"


def small(folder, dim: int) -> str:
    """A config with heads of ``dim``."""
    dims = {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    return str(write(folder, "config.json", json.dumps(CONFIG | dims | heads)))


def _print_noted(config: str) -> None:
    from megatron_gdn.warm_up.absent_gpu import simulated_hopper

    # a small GPU, few sequences
    uses = "--uses uncut states whole --multiprocessors 8"
    layers._LONG_LENGTH = 640  # the plain rule takes one chunk after the other
    arguments = parse(f"--config {config} --cp 2 --kernels triton {uses}".split())
    with simulated_hopper(arguments.multiprocessors):
        tasks, heads = layers.tasks_of(sizes_from_options(arguments), arguments)
    assert not heads
    print(*(task.name for task in tasks), flush=True)
    os._exit(0)


def test_what_cannot_be_compiled_is_said_on_one_line(tmp_path, capfd, monkeypatch):
    # as if installed
    monkeypatch.setattr(obstacles, "why_not_flash_qla_package", lambda: None)
    for argv, said in {
        "--heads 16:31": "key heads must divide value heads",
        "--heads 16:32 --tp 3": "use one of 1, 2, 4, 8, 16",
        f"--config {tmp_path / 'no.json'}": "does not exist",
        f"--config {small(tmp_path, 64)}": "head dims of 128, not key_head_dim=64",
        "--heads 1:3": "an even number of value heads per rank, not 3",
    }.items():
        assert run(*argv.split()) == 2
        error = capfd.readouterr().err
        assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_a_run_is_told_once_all_is_there(tmp_path, monkeypatch, capfd):
    keep_cache_in(tmp_path, monkeypatch)
    heads = Heads(16, 32, torch.float16)

    def compile() -> bool:
        missing = not (tmp_path / "kernel").exists()
        if not (tmp_path / "nvcc").exists():
            raise RuntimeError("no nvcc")
        (tmp_path / "kernel").touch()
        return missing

    found = [Task("kernel", compile), Task("Triton's", lambda: False)], {heads}
    monkeypatch.setattr(layers, "tasks_of", lambda *of: found)
    command = ["--heads", "16:32", "--uses", "cut"]
    assert run(*command) == 1
    said = capfd.readouterr()
    assert "RuntimeError: no nvcc" in said.err and "1 of 2 failed" in said.out
    (tmp_path / "nvcc").touch()
    assert run(*command) == 0
    assert (
        "2 of 2 are ready" in (said := capfd.readouterr().out)
        and "1 were compiled" in said
    )
    assert run(*command) == 0
    assert (
        "2 of 2 are ready" in (said := capfd.readouterr().out)
        and "all were there" in said
    )


def test_what_packages_say_when_they_are_imported_is_hidden(monkeypatch):
    def note_no_tasks(*_):
        with warnings.catch_warnings(record=True) as notes:
            where = UserWarning, "a.py", 1
            warnings.warn_explicit("no fla", *where, "megatron.core.a")
            warnings.warn_explicit("no GPU", *where, "fla.a")
        assert not notes
        return [], set()

    monkeypatch.setattr(layers, "tasks_of", note_no_tasks)
    warnings.resetwarnings()  # pytest hides the same
    assert run("--heads", "16:32") == 0


def _compile_for_a_run(reading: int, began) -> None:
    os.setsid()
    os.dup2(reading, 0)
    began.set()
    warm_up.main(["--heads", "16:32", "--for-a-run"])


def test_the_command_ends_with_the_run_that_started_it(monkeypatch):
    """The run's end closes the command's standard input, whatever it compiles."""
    monkeypatch.setattr(warm_up, "_compile", lambda _: time.sleep(60))
    reading, writing = os.pipe()
    os.set_inheritable(writing, False)
    began = FORK.Event()
    process = FORK.Process(
        target=_after_closing, args=(writing, reading, began), daemon=True
    )
    process.start()
    began.wait(PATIENCE)
    os.write(writing, b"not the end")
    process.join(0.5)
    assert process.is_alive()
    os.close(writing)
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL


def test_a_command_for_a_run_needs_no_lock_which_the_run_holds(
    tmp_path, monkeypatch, capfd
):
    pytest.importorskip("triton", minversion="3.6")
    keep_cache_in(tmp_path, monkeypatch)
    heads = Heads(16, 32, torch.float16)
    found = [Task("kernel", lambda: True)], {heads}
    monkeypatch.setattr(layers, "tasks_of", lambda *of: found)
    reading, _ = os.pipe()
    with build_lock(heads.lock, "the run"):
        process = FORK.Process(target=_compile_for_a_run, args=(reading, FORK.Event()))
        process.start()
        process.join(PATIENCE)
        process.kill()
    assert "1 of 1 are ready" in capfd.readouterr().out


def _after_closing(writing: int, *arguments) -> None:
    os.close(writing)
    _compile_for_a_run(*arguments)
