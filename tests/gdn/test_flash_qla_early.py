"""Kernels begin to be compiled when a layer is built, with a stand-in for the compiler."""

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.context_parallel import SequenceLayout
from megatron_gdn.gdn.flash_qla import builds as flash_qla_builds
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla.builds import Heads, compile_early, tilelang_cache
from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.gdn.sizes import GDNDims
from megatron_gdn.mixers.loader_layout import LoaderLayout
from megatron_gdn.mixers.micro_batch import MicroBatches
from megatron_gdn.ops.kernels.builds import build_lock
from tests.processes import PATIENCE, fork, until

from .test_flash_qla_builds import lock_is_free

HEADS = Heads(16, 32, torch.float16)
COMPILES = """
import pathlib, sys, time
folder, part = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(folder / "started", "a") as file:
    file.write(f"{part} ")
while not (folder / "end").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """With a Hopper GPU as far as this is asked for, and an empty cache."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MEGATRON_GDN_COMPILE_AHEAD", raising=False)
    monkeypatch.delenv("TILELANG_DISABLE_CACHE", raising=False)
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)  # which a layer need not import
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(flash_qla_builds, "_started", {})
    monkeypatch.setattr(
        flash_qla_builds, "command",
        lambda heads, part: [sys.executable, "-c", COMPILES, str(tmp_path), part],
    )  # fmt: skip
    yield tmp_path
    (tmp_path / "end").touch()
    for process in flash_qla_builds._started.values():
        process.communicate()


def started(folder: Path) -> str:
    path = folder / "started"
    return path.read_text() if path.exists() else ""


def test_one_process_of_a_machine_has_the_kernels_compiled_and_says_so(machine):
    def build_layers(rank: int) -> None:
        logging.basicConfig(filename=machine / f"log {rank}", force=True)
        for _ in range(3):
            compile_early(HEADS, "cut")
        (machine / f"goes on {rank}").touch()
        until((machine / "end").exists)

    ranks = [fork(build_layers, rank) for rank in range(3)]
    until(lambda: len(list(machine.glob("goes on *"))) == 3)  # nobody waits for a kernel
    until(lambda: started(machine))
    assert not lock_is_free(HEADS), "the processes that compile hold it"
    logs = "".join(path.read_text() for path in machine.glob("log *"))
    assert logs.count("for 16:32 heads in fp16 are compiled from here on") == 1
    assert str(tilelang_cache()) in logs
    assert "`python -m megatron_gdn.warm_up --heads 16:32 --operands fp16`" in logs
    (machine / "end").touch()
    for process in ranks:
        process.join(PATIENCE)
        assert process.exitcode == 0
    until(lambda: lock_is_free(HEADS))
    assert started(machine) == "cut "


def ready(part: str = "cut") -> Path:
    """As warm_up leaves it."""
    path = HEADS.ready(part, 132)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_where_all_kernels_are_there_nothing_is_started(machine, caplog):
    path = ready()
    compile_early(HEADS, "cut")
    assert not caplog.text and not flash_qla_builds._started
    path.unlink()
    compile_early(HEADS, "cut")
    assert "compiled from here on" in caplog.text
    until(lambda: started(machine))


@pytest.mark.parametrize("other", [("states", 132), ("cut", 114)])
def test_kernels_of_another_part_or_gpu_do_not_count(machine, other):
    ready("cut")
    assert HEADS.ready("cut", 132).exists()
    assert not HEADS.ready(*other).exists()


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
    another = build_lock(HEADS.lock, "FlashQLA")
    with another if why == "another process compiles" else nullcontext():
        compile_early(HEADS, "cut")
    assert not flash_qla_builds._started and not caplog.text


def test_a_cache_that_cannot_be_written_is_left_to_the_first_call(machine, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(machine / "file"))
    (machine / "file").touch()
    compile_early(HEADS, "cut")
    assert not flash_qla_builds._started


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


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
    sizes = GDNDims(
        hidden_size=64, num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128,
        conv_kernel_dim=4,
    ).heads  # fmt: skip
    rule = HalfOperands(FlashQlaRule()) if operands == "fp16" else FlashQlaRule()
    MicroBatches(
        config, sizes.layout, sizes.state, 4, Group(ranks),
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
