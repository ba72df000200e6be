"""Processes that compile while a layer is built or a run waits, with stand-ins for compilers."""

import logging
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.context_parallel import SequenceLayout
from megatron_gdn.gdn.flash_qla import builds
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla.builds import Heads, compile_early, tilelang_cache
from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.mixers.loader_layout import LoaderLayout
from megatron_gdn.mixers.micro_batch import MicroBatches
from megatron_gdn.ops.kernels.builds import build_lock
from tests.gdn_mixer import gdn_dims
from tests.processes import PATIENCE, fork, until

# As `python -m megatron_gdn.warm_up --for-a-run`: a fork compiles, the process ends with its input.
COMPILES = """
import os, pathlib, sys, time
from megatron_gdn.warm_up.__main__ import _end_with_the_run
_end_with_the_run()
folder, quick, slow = pathlib.Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
if os.fork() == 0:
    (folder / "written").write_text(str(os.getpid()))
    (folder / "written").rename(folder / "fork")  # who finds it reads all of it
    time.sleep(1000)
time.sleep(quick)
(folder / "quick").touch()
print("1 of 2 kernels", flush=True)
time.sleep(slow)
(folder / "slow").touch()
print("2 of 2 kernels", flush=True)
os.kill(int((folder / "fork").read_text()), 9)
"""


def command(folder: Path, quick: float, slow: float) -> list[str]:
    return [sys.executable, "-c", COMPILES, str(folder), str(quick), str(slow)]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False


HEADS = Heads(2, 4, torch.bfloat16)


class Kernel:
    def __init__(self, entry: Path) -> None:
        self.entry, self.made_here = entry, 0

    def compile(self):
        self.made_here += not self.entry.exists()


def call(folder: Path, wanted: str) -> Kernel:
    kernel = Kernel(folder / wanted)
    entry = SimpleNamespace(name=wanted, is_there=kernel.entry.exists, remember=lambda made: None)
    builds._capability = lambda: builds.HOPPER
    builds.cache_is_used = lambda: True
    builds.CacheEntry = SimpleNamespace(of=lambda *call: entry)
    builds.set_next_calls(HEADS, "cut")
    builds.watch_builds([kernel])
    kernel.compile()
    return kernel


def compile_ahead(folder: Path, quick: float, slow: float, wanted: str) -> None:
    logging.basicConfig(filename=folder / "log", format="%(message)s", force=True)
    output = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 2)
    builds.command = lambda heads, part: command(folder, quick, slow)
    call(folder, wanted)
    (folder / "goes on").touch()
    time.sleep(1000)


@pytest.fixture
def rank(tmp_path, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MEGATRON_GDN_COMPILE_AHEAD", raising=False)
    monkeypatch.setattr(builds, "_started", {})
    started = []

    def start(*args):
        started.append(fork(compile_ahead, tmp_path, *args))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def lock_is_free(heads=HEADS) -> bool:
    with build_lock(heads.lock, "a test", wait=False) as lock:
        return lock is not None


def test_a_run_goes_on_with_its_kernel_while_the_rest_is_compiled(tmp_path, rank):
    rank(0.2, 3, "quick")
    until((tmp_path / "goes on").exists)
    assert not (tmp_path / "slow").exists()
    assert not lock_is_free(), "the processes that compile hold the lock"
    until((tmp_path / "slow").exists)
    until(lock_is_free)
    said = (tmp_path / "log").read_text()
    assert "`python -m megatron_gdn.warm_up --heads 2:4 --operands bf16`" in said
    assert "1 of 2 kernels" in said and "2 of 2 kernels" in said


def test_a_killed_rank_takes_its_compilers_along(tmp_path, rank):
    killed = rank(1000, 0, "quick")
    until((tmp_path / "fork").exists)
    fork = int((tmp_path / "fork").read_text())
    assert not lock_is_free()
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: not alive(fork))
    until(lock_is_free)


def test_compilers_that_fail_are_quoted_and_nobody_waits_for_them(
    tmp_path, rank, monkeypatch, caplog, capfd
):
    fails = [sys.executable, "-c", "raise SystemExit('nvcc is not there')"]
    for name, stand_in in {
        "command": lambda heads, part: fails, "_capability": None, "cache_is_used": None,
        "CacheEntry": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(builds, name, stand_in)  # and puts back what call() sets
    assert call(tmp_path, "quick").made_here == 1
    assert call(tmp_path, "slow").made_here == 1, "by this process, which starts no others again"
    assert capfd.readouterr().err.count("nvcc is not there") == 1
    assert caplog.text.count("compiled from here on") == 1
    assert "compiles FlashQLA's quick for 2:4 heads in bf16 in this process" in caplog.text


OTHER_HEADS = Heads(16, 32, torch.float16)
WAITS_FOR_ITS_END = """
import pathlib, sys, time
folder, part = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(folder / "started", "a") as file:
    file.write(f"{part} ")
while not (folder / "end").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MEGATRON_GDN_COMPILE_AHEAD", raising=False)
    monkeypatch.delenv("TILELANG_DISABLE_CACHE", raising=False)
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)  # which a layer need not import
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(builds, "_started", {})
    monkeypatch.setattr(
        builds, "command",
        lambda heads, part: [sys.executable, "-c", WAITS_FOR_ITS_END, str(tmp_path), part],
    )  # fmt: skip
    yield tmp_path
    (tmp_path / "end").touch()
    for process in builds._started.values():
        process.communicate()


def started(folder: Path) -> str:
    path = folder / "started"
    return path.read_text() if path.exists() else ""


def test_one_process_of_a_machine_has_the_kernels_compiled_and_says_so(machine):
    def build_layers(rank: int) -> None:
        logging.basicConfig(filename=machine / f"log {rank}", force=True)
        for _ in range(3):
            compile_early(OTHER_HEADS, "cut")
        (machine / f"goes on {rank}").touch()
        until((machine / "end").exists)

    ranks = [fork(build_layers, rank) for rank in range(3)]
    until(lambda: len(list(machine.glob("goes on *"))) == 3)  # nobody waits for a kernel
    until(lambda: started(machine))
    assert not lock_is_free(OTHER_HEADS), "the processes that compile hold it"
    logs = "".join(path.read_text() for path in machine.glob("log *"))
    assert logs.count("for 16:32 heads in fp16 are compiled from here on") == 1
    assert str(tilelang_cache()) in logs
    assert "`python -m megatron_gdn.warm_up --heads 16:32 --operands fp16`" in logs
    (machine / "end").touch()
    for process in ranks:
        process.join(PATIENCE)
        assert process.exitcode == 0
    until(lambda: lock_is_free(OTHER_HEADS))
    assert started(machine) == "cut "


def ready(part: str = "cut") -> Path:
    path = OTHER_HEADS.done_file(part, 132)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_where_all_kernels_are_there_nothing_is_started(machine, caplog):
    path = ready()
    compile_early(OTHER_HEADS, "cut")
    assert not caplog.text and not builds._started
    path.unlink()
    compile_early(OTHER_HEADS, "cut")
    assert "compiled from here on" in caplog.text
    until(lambda: started(machine))


@pytest.mark.parametrize("other", [("states", 132), ("cut", 114)])
def test_kernels_of_another_part_or_gpu_do_not_count(machine, other):
    ready("cut")
    assert OTHER_HEADS.done_file("cut", 132).exists()
    assert not OTHER_HEADS.done_file(*other).exists()


@pytest.mark.parametrize(
    "why", ["switched off", "no GPU", "Blackwell", "no cache", "another process compiles"]
)
def test_nothing_is_started_without_need(machine, monkeypatch, caplog, why):
    if why == "switched off":
        monkeypatch.setenv("MEGATRON_GDN_COMPILE_AHEAD", "0")
    if why == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if why == "Blackwell":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    if why == "no cache":
        monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    another = build_lock(OTHER_HEADS.lock, "FlashQLA")
    with another if why == "another process compiles" else nullcontext():
        compile_early(OTHER_HEADS, "cut")
    assert not builds._started and not caplog.text


def test_a_cache_that_cannot_be_written_is_left_to_the_first_call(machine, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(machine / "file"))
    (machine / "file").touch()
    compile_early(OTHER_HEADS, "cut")
    assert not builds._started


@pytest.mark.parametrize(
    ("ranks", "mode", "asked"),
    [
        (1, "auto", ("16:32", "cut")),
        (2, "headwise", ("8:16", "cut")),
        (2, "chunkwise", ("16:32", "states")),
        (2, "auto", None),  # either of the two, by the length of what comes
    ],
)
@pytest.mark.parametrize("operands", ["fp16", "bf16"])
def test_a_layer_asks_for_the_kernels_that_it_will_surely_need(
    monkeypatch, ranks, mode, asked, operands
):
    calls = []
    monkeypatch.setattr(flash_qla, "compile_early", lambda *call: calls.append(call))
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, bf16=True)
    sizes = gdn_dims(64, 16, 32, 128, 128).heads
    rule = HalfOperands(FlashQlaRule()) if operands == "fp16" else FlashQlaRule()

    class Group:
        size, rank = staticmethod(lambda: ranks), staticmethod(lambda: 0)

    MicroBatches(
        config, sizes.layout, sizes.state, 4, Group(),
        LoaderLayout(SequenceLayout.ZIGZAG, config), mode=mode,
        choose_rule=lambda *rows, **modes: (rule, "for a test"),
    )  # fmt: skip
    if asked is None:
        assert not calls
    else:
        ((heads, part),) = calls
        assert (str(heads), part) == (f"{asked[0]} heads in {operands}", asked[1])


def test_the_cache_is_found_without_tilelang_where_tilelang_has_it(tmp_path, monkeypatch):
    pytest.importorskip("tilelang")
    from tilelang import env

    for folder in (None, str(tmp_path)):
        if folder is None:
            monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TILELANG_CACHE_DIR", folder)
        with monkeypatch.context() as without:
            without.delitem(sys.modules, "tilelang")
            found = tilelang_cache()
        assert found == Path(env.TILELANG_CACHE_DIR) == tilelang_cache()
    assert os.environ["TILELANG_CACHE_DIR"] == str(tmp_path)
