"""FlashQLA's kernels: fences where a thread signals without one, and one not yet
compiled."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn.flash_qla import builds as flash_qla_builds
from megatron_gdn.gdn.flash_qla import fences
from megatron_gdn.gdn.flash_qla.builds import (
    Heads,
    cache_entry,
    compile_once_per_machine,
    mark_as_cached,
    set_next_calls,
)
from megatron_gdn.ops.obstacles import log_obstacle_once

from .stand_ins import keep_cache_in

HEAD = 'extern "C" __global__ void __launch_bounds__(512, 1) tilelang_fused_chunk_gdr_bwd_kernel('
# Warps that compute fill `sent` and signal; another warp sends it out. `kept` never
# leaves.
KERNEL = """
    tl::fence_proxy_async();
    *(uint4*)(((bfloat16_t*)kept) + 8) = x;
    bar_00[0].arrive();
    for (int i = 0; i < 4; ++i) {
      *(uint1*)(((bfloat16_t*)sent) + (i * 8)) = y;
    }
    FIRST
    bar_01[0].arrive();
    bar_01[0].wait(0);
    x = *(uint4*)(((bfloat16_t*)sent) + 8);
    bar_02[0].arrive();
    tl::ptx_stmatrix_m8n8_x4((&(((half_t*)sent)[z])), a, b, c, d);
    SECOND
    __syncthreads();
    tl::tma_store(desc, (&(((bfloat16_t*)sent)[(i * 4096)])), 0, left);
    tl::tma_store_arrive();
"""
FENCE = "tl::fence_proxy_async();"


def source(first: str = "", second: str = "", head: str = HEAD) -> str:
    lines = KERNEL.replace("FIRST", first).replace("SECOND", second).split("\n")
    return "\n".join([head, *(line for line in lines if line.strip())])


@pytest.mark.parametrize(
    "present", [("", ""), (FENCE, ""), ("", FENCE), (FENCE, FENCE)]
)
def test_a_write_is_fenced_before_the_next_signal(present):
    given = source(*present)
    wanted = source(FENCE, FENCE)
    assert len(fences.missing_fences(given)) == present.count("")
    assert fences.with_fences(given) == wanted
    assert fences.missing_fences(wanted) == [] and fences.with_fences(wanted) == wanted


def test_a_kernel_without_bulk_stores_stays_as_it_is():
    given = source().replace("tma_store(", "plain_store(")
    assert fences.with_fences(given) == given


def test_a_signal_before_the_first_write_needs_no_fence():
    given = "__syncthreads();\n" + source(FENCE, FENCE)
    assert fences.with_fences(given) == given


@dataclass
class Compiled:
    """What tilelang's decorator makes of a function; its kernel's source is
    ``text``."""

    pass_configs: dict | None = None
    text: str = ""
    cache: dict = field(default_factory=dict, init=False)

    def compile(self, heads):
        return SimpleNamespace(get_kernel_source=lambda: self.text, heads=heads)


@pytest.fixture
def tilelang(monkeypatch):
    hooks = {}
    callback = ModuleType("tilelang.engine.callback")
    callback.register_cuda_postproc = lambda hook: hooks.update(
        {fences._POSTPROCESSING_HOOK: hook}
    )
    ffi = ModuleType("tvm_ffi")

    def get_global_func(name, allow_missing=False):
        if name not in hooks and not allow_missing:
            raise ValueError(f"Cannot find global function {name}")
        return hooks.get(name)

    ffi.get_global_func = get_global_func
    monkeypatch.setitem(sys.modules, "tilelang", ModuleType("tilelang"))
    monkeypatch.setitem(sys.modules, "tilelang.engine", ModuleType("tilelang.engine"))
    monkeypatch.setitem(sys.modules, "tilelang.engine.callback", callback)
    monkeypatch.setitem(sys.modules, "tvm_ffi", ffi)
    return hooks


def test_the_kernels_of_flash_qla_are_compiled_with_fences(tilelang):
    configs = {"tl.enable_fast_math": True, "tl.device_compile_flags": ["-O3"]}
    module = SimpleNamespace(backward=Compiled(configs))
    module.backward.cache["unfenced"] = "kernel"
    fences.fence_bulk_stores.__wrapped__((module, "backward"))
    hook = tilelang[fences._POSTPROCESSING_HOOK]
    assert hook(source(), "cuda") == source(FENCE, FENCE)
    other = source(
        head=HEAD.replace("tilelang_fused_chunk_gdr_bwd_kernel", "somebody_elses")
    )
    assert hook(other, "cuda") == other
    # Neither what this process compiled before nor what lies on the disk is taken.
    assert module.backward.cache == {}
    assert module.backward.pass_configs == {
        "tl.enable_fast_math": True,
        "tl.device_compile_flags": ["-O3", fences._FENCED_FLAG],
    }


def compile_one(text: str):
    module = SimpleNamespace(backward=Compiled(text=text))
    fences.fence_bulk_stores.__wrapped__((module, "backward"))
    return module.backward.compile(heads=32)


def test_a_kernel_that_comes_without_fences_is_refused(tilelang):
    """Another hook took ours' place, or a cache holds what was compiled meanwhile."""
    assert compile_one(source(FENCE, FENCE)).heads == 32
    with pytest.raises(
        RuntimeError, match="backward was compiled without the fences.*tilelang"
    ):
        compile_one(source(FENCE, ""))


def test_stores_that_nobody_can_read_are_announced(tilelang, caplog):
    log_obstacle_once.cache_clear()
    compile_one(source(FENCE, FENCE) + "\n    tl::tma_store(desc, sent, 0);")
    assert (
        "not known here; whether the stores have fences was not checked" in caplog.text
    )


def test_a_hook_that_was_there_before_still_runs_first(tilelang):
    tilelang[fences._POSTPROCESSING_HOOK] = lambda text, target: (
        f"// for {target}\n{text}"
    )
    fences.fence_bulk_stores.__wrapped__()
    assert tilelang[fences._POSTPROCESSING_HOOK](
        source(), "cuda"
    ) == "// for cuda\n" + source(FENCE, FENCE)


HEADS = Heads(16, 32, torch.float16)


class Kernel:
    """As tilelang's object for a function: ``compile`` finds its result on disk, or
    makes it."""

    func_source = "def kkt_solve(H): ..."
    pass_configs = {"fast_math": True}
    func = SimpleNamespace(orig_func=SimpleNamespace(__name__="tilelang_kkt_solve"))

    def __init__(self, folder) -> None:
        self._folder = folder
        self.made = []

    def compile(self, *args, **kwargs):
        place = self._folder / f"entry-{args}-{sorted(kwargs.items())}"
        if not place.is_dir():
            self.made.append(args)
            place.mkdir()
        return SimpleNamespace(_tilelang_cache_path=str(place))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    keep_cache_in(tmp_path, monkeypatch)
    monkeypatch.setattr(flash_qla_builds, "_capability", lambda: (9, 0))
    monkeypatch.setenv("MEGATRON_GDN_COMPILE_AHEAD", "0")
    monkeypatch.setattr(flash_qla_builds, "_started_commands", {})
    set_next_calls(HEADS, "cut")
    return tmp_path


def watched(folder) -> Kernel:
    kernel = Kernel(folder)
    compile_once_per_machine([kernel])
    return kernel


def test_a_kernel_is_compiled_once_and_said(cache, caplog):
    first = watched(cache)
    another = watched(cache)
    first.compile(32, dtype=torch.float16)
    assert first.made == [(32,)]
    assert (
        "compiles FlashQLA's kkt_solve for 16:32 heads in fp16 in this process"
        in caplog.text
    )
    caplog.clear()
    another.compile(32, dtype=torch.float16)
    assert not another.made and not caplog.text, "found, without a word"
    another.compile(32, dtype=torch.bfloat16)
    assert another.made == [(32,)], "another kernel"


def test_all_kernels_for_the_heads_are_compiled_ahead_once(cache, monkeypatch):
    began = []

    class Ahead:
        def __init__(self, command, **options) -> None:
            began.append(command)
            Kernel(cache).compile(32)

        def poll(self) -> int:
            return 0

    monkeypatch.delenv("MEGATRON_GDN_COMPILE_AHEAD")
    monkeypatch.setattr(flash_qla_builds.subprocess, "Popen", Ahead)
    properties = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    set_next_calls(HEADS, "states")
    kernel = watched(cache)
    kernel.compile(32)
    kernel.compile(64)
    (command,) = began
    said = " ".join(command)
    assert "-m megatron_gdn.warm_up --heads 16:32 --operands fp16" in said
    assert "--uses states cut rows uncut --multiprocessors 78 --for-a-run" in said


@pytest.mark.parametrize("why", ["switched off", "Blackwell"])
def test_no_command_is_started_without_need(cache, monkeypatch, why):
    if why == "Blackwell":
        monkeypatch.delenv("MEGATRON_GDN_COMPILE_AHEAD")
        monkeypatch.setattr(flash_qla_builds, "_capability", lambda: (10, 0))
    monkeypatch.setattr(flash_qla_builds.subprocess, "Popen", None)
    kernel = watched(cache)
    kernel.compile(32)
    assert kernel.made == [(32,)]


def test_a_kernel_that_tilelang_has_not_kept_is_not_there(cache):
    kernel = Kernel(cache)
    entry = cache_entry(kernel, (32,), {}, "9.0")
    for unkept in (
        SimpleNamespace(),
        SimpleNamespace(_tilelang_cache_path=str(cache / "lost")),
    ):
        mark_as_cached(entry, unkept)
        assert not entry.exists()
    mark_as_cached(entry, kernel.compile(32))
    assert entry.exists()


def test_an_entry_is_of_one_kernel_with_its_settings_and_one_gpu(cache):
    def entry(args=(32,), options=(), arch="9.0", **changes):
        kernel = Kernel(cache)
        vars(kernel).update(changes)
        return cache_entry(kernel, args, dict(options), arch)

    entries = {
        entry(),
        entry((16,)),
        entry(options={"dtype": "bf16"}),
        entry(arch="10.0"),
        entry(func_source="def another(H): ..."),
        entry(pass_configs={"fast_math": False}),
        entry(pass_configs=None),
    }
    assert len(entries) == 7
    assert entry(pass_configs=None) == entry(pass_configs={})


def test_a_copy_of_the_cache_elsewhere_has_its_kernels(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    kernel = Kernel(tmp_path / "here")
    keep_cache_in(tmp_path / "here", monkeypatch)
    mark_as_cached(cache_entry(kernel, (32,), {}, "9.0"), kernel.compile(32))
    (tmp_path / "here").rename(tmp_path / "there")
    keep_cache_in(tmp_path / "there", monkeypatch)
    assert cache_entry(kernel, (32,), {}, "9.0").exists()


def test_a_cache_that_is_switched_off_is_left_alone(cache, monkeypatch):
    keep_cache_in(cache, monkeypatch, enabled=False)
    watched(cache).compile(32)
    assert [path.name for path in cache.iterdir()] == ["entry-(32,)-[]"]
