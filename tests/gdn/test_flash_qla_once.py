"""A kernel of FlashQLA that is not compiled yet, with a stand-in of tilelang."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn.flash_qla import builds as flash_qla_builds
from megatron_gdn.gdn.flash_qla.builds import CacheEntry, Heads, expect, watch_builds

HEADS = Heads(16, 32, torch.float16)


class Kernel:
    """As tilelang's object for a function: ``compile`` finds its result on disk, or makes it."""

    func_source, pass_configs = "def kkt_solve(H): ...", {"fast_math": True}
    func = SimpleNamespace(orig_func=SimpleNamespace(__name__="tilelang_kkt_solve"))

    def __init__(self, folder) -> None:
        self._folder, self.made = folder, []

    def compile(self, *args, **kwargs):
        place = self._folder / f"entry-{args}-{sorted(kwargs.items())}"
        if not place.is_dir():
            self.made.append(args)
            place.mkdir()
        return SimpleNamespace(_tilelang_cache_path=str(place))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flash_qla_builds, "cache_is_used", lambda: True)
    monkeypatch.setattr(flash_qla_builds, "_capability", lambda: (9, 0))
    monkeypatch.setenv("MEGATRON_GDN_COMPILE_AHEAD", "0")
    monkeypatch.setattr(flash_qla_builds, "_started", {})
    expect(HEADS, "cut")
    return tmp_path


def watched(folder) -> Kernel:
    kernel = Kernel(folder)
    watch_builds([kernel])
    return kernel


def test_a_kernel_is_compiled_once_and_said(cache, caplog):
    first, another = watched(cache), watched(cache)
    first.compile(32, dtype=torch.float16)
    assert first.made == [(32,)]
    assert "compiles FlashQLA's kkt_solve for 16:32 heads in fp16 in this process" in caplog.text
    caplog.clear()
    another.compile(32, dtype=torch.float16)
    assert not another.made and not caplog.text, "found, without a word"
    another.compile(32, dtype=torch.bfloat16)
    assert another.made == [(32,)], "another kernel"


def test_all_kernels_for_the_heads_are_compiled_ahead_once(cache, monkeypatch, caplog):
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
    expect(HEADS, "states")
    kernel = watched(cache)
    kernel.compile(32)
    kernel.compile(64)
    (command,) = began
    said = " ".join(command)
    assert "-m megatron_gdn.warm_up --heads 16:32 --operands fp16" in said
    assert "--parts states cut rows uncut --multiprocessors 78 --for-a-run" in said
    text = caplog.records[0].getMessage()
    assert "for 16:32 heads in fp16 are compiled from here on" in text
    assert "`python -m megatron_gdn.warm_up --heads 16:32 --operands fp16`" in text


def test_an_entry_that_tilelang_has_lost_is_not_there(cache):
    kernel = Kernel(cache)
    entry = CacheEntry.of(kernel, (32,), {}, "9.0")
    made = kernel.compile(32)
    assert not entry.is_there()
    entry.remember(made)
    assert entry.is_there()
    (cache / "entry-(32,)-[]").rmdir()
    assert not entry.is_there()


def test_a_copy_of_the_cache_elsewhere_has_its_kernels(tmp_path, monkeypatch):
    for name in ("here", "there"):
        monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / name))
        entry = CacheEntry.of(kernel := Kernel(tmp_path / name), (32,), {}, "9.0")
        if name == "here":
            (tmp_path / name).mkdir()
            entry.remember(kernel.compile(32))
            (tmp_path / name).rename(tmp_path / "there")
    assert entry.is_there()


def test_a_cache_that_is_switched_off_is_left_alone(cache, monkeypatch):
    monkeypatch.setattr(flash_qla_builds, "cache_is_used", lambda: False)
    watched(cache).compile(32)
    assert [path.name for path in cache.iterdir()] == ["entry-(32,)-[]"]
