"""Kernels are compiled for Hopper here, without a GPU, and found again."""

import json
import re
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", minversion="3.6")

from megatron_gdn.ops.kernels.builds import compile_in_one_process
from tests.processes import python


def under_lock(compile):
    kernel = SimpleNamespace(__name__="mix_kernel", _do_compile=compile)
    compile_in_one_process(kernel)
    return kernel._do_compile


def run(folder, *arguments: str) -> str:
    caches = {
        f"{name}_CACHE_DIR": str(folder / name) for name in ("TRITON", "TILELANG")
    }
    return python(*arguments, timeout=900, TRITON_INTERPRET="0", **caches).stdout


def test_a_slow_compilation_says_so_while_it_runs(tmp_path, monkeypatch, caplog):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))

    def slow(of: str) -> str:
        time.sleep(1.0)
        assert (
            "compiles Triton's mix_kernel" in caplog.text and "warm_up" in caplog.text
        )
        return of.upper()

    assert under_lock(slow)("made") == "MADE"
    caplog.clear()
    assert under_lock(str.upper)("made") == "MADE" and not caplog.text


def test_variants_of_a_kernel_do_not_wait_for_each_other(tmp_path, monkeypatch, caplog):
    """Another process compiles one variant of a kernel; this one wants it, and then
    another."""
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    under_lock(str.upper)("first")
    (locks,) = (tmp_path / "megatron_gdn").iterdir()  # the folder of this user
    (lock,) = locks.iterdir()
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, "
        "flush=True)"
    )
    command = [sys.executable, "-c", f"{code}; time.sleep(60)", str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert under_lock(str.upper)("second") == "SECOND" and not caplog.text
        threading.Timer(1.5, other.kill).start()
        assert under_lock(str.upper)("first") == "FIRST"
    assert "waits for" in caplog.text


def test_every_kernel_of_the_mixer_is_compiled_by_one_process():
    from triton.runtime.jit import JITFunction

    from megatron_gdn.gdn import half_kernels
    from megatron_gdn.ops.front import history_kernels, launches
    from megatron_gdn.ops.kernels import reduce
    from megatron_gdn.ops.kernels.launch import Launch
    from megatron_gdn.ops.readout import kernels as norm
    from megatron_gdn.ops.state_maps import chains_kernels

    modules = half_kernels, history_kernels, launches, norm, reduce, chains_kernels
    named = [(name, x) for module in modules for name, x in vars(module).items()]
    found = [
        x
        for name, x in named
        if isinstance(x, JITFunction) and name.endswith("_kernel")
    ]
    assert {kernel.__module__.rsplit(".", 1)[1] for kernel in found} == {
        "half_kernels",
        "history_kernels",
        "kernels",
        "reduce",
        "chains_kernels",
    }
    for kernel in found:
        Launch(kernel, (1,), num_warps=4)
    assert all(hasattr(kernel._do_compile, "__wrapped__") for kernel in found)


@pytest.mark.nightly
def test_the_mixers_kernels_are_compiled_and_found_again(tmp_path):
    warm_up = ["-m", "megatron_gdn.warm_up", "--heads", "2:4", "--kernels", "triton"]
    first = re.search(
        r"(\d+) of \1 are ready after .*; \1 were compiled", run(tmp_path, *warm_up)
    )
    assert first is not None and int(first[1]) > 8
    assert "all were there" in run(tmp_path, *warm_up)


@pytest.mark.nightly
def test_heads_of_other_sizes_are_compiled_too(tmp_path):
    sizes = {
        "num_key_heads": 2,
        "num_value_heads": 2,
        "key_head_dim": 96,
        "value_head_dim": 192,
    }
    config = {
        f"linear_{name}": size for name, size in {**sizes, "conv_kernel_dim": 4}.items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    warm_up = [
        "-m",
        "megatron_gdn.warm_up",
        "--config",
        str(tmp_path),
        "--kernels",
        "triton",
    ]
    assert re.search(r"(\d+) of \1 are ready", run(tmp_path, *warm_up))


QUICK_KERNELS = """
from megatron_gdn.warm_up.__main__ import parse
from megatron_gdn.warm_up.absent_gpu import simulated_hopper
from megatron_gdn.warm_up.layers import sizes_from_options, tasks_of
from megatron_gdn.warm_up.tasks import run_tasks
arguments = parse(["--heads", "2:4", "--uses", "uncut", "--kernels", "flash_qla"])
with simulated_hopper():
    tasks, _ = tasks_of(sizes_from_options(arguments), arguments)
    quick = [task for task in tasks if "cumsum" in task.name]
    print(len(tasks), len(quick), *run_tasks(quick, 2))
"""


@pytest.mark.nightly
def test_flash_qlas_kernels_are_compiled_and_found_again(tmp_path):
    # which cannot be imported without a GPU, or a stand-in
    if find_spec("flash_qla") is None:
        pytest.skip("flash_qla is not installed")
    assert run(tmp_path, "-c", QUICK_KERNELS).split()[-3:] == ["2", "2", "{}"]
    assert run(tmp_path, "-c", QUICK_KERNELS).split()[-3:] == ["2", "0", "{}"]
