"""Timing and memory on one GPU: CUDA events, medians, and what the figures were
measured on."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "flash-linear-attention",
    "flash-qla",
    "tilelang",
)


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def environment() -> dict[str, str | None]:
    """The GPU and the versions every record carries."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {package: version_of(package) for package in PACKAGES}
    return {"gpu": gpu, "cuda": torch.version.cuda, **versions}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary_of(times: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and how many there are."""
    times = sorted(times)
    tenth = len(times) // 10
    return {
        "median": statistics.median(times),
        "p10": times[tenth],
        "p90": times[-1 - tenth],
        "n": len(times),
    }


def time_ms(
    run: Callable[[], object], *, warmup: int = 5, repeats: int = 20
) -> dict[str, float]:
    """Median, 10th and 90th percentile of ``run`` on the device, in milliseconds.

    Launches queue up behind each other, so the host's own pace shows only where it is
    slower than the device; ``host`` is what the host took for a call, of the first few,
    while the queue had room. Inputs are assumed larger than the L2 cache.
    """
    for _ in range(warmup):
        run()
    pairs = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)
    ]
    torch.cuda.synchronize()
    host = []
    for begin, end in pairs:
        began = time.perf_counter()
        begin.record()
        run()
        end.record()
        host.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in pairs]
    return summary_of(times) | {"host": statistics.median(host[:5])}


def time_of(
    run: Callable[[], object], repeats: int, warmup: int = 5
) -> dict[str, float]:
    """:func:`time_ms`; without a GPU the mean of ``repeats`` calls as its median."""
    if torch.cuda.is_available():
        return time_ms(run, warmup=warmup, repeats=repeats)
    run()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return {"median": (time.perf_counter() - began) * 1e3 / repeats, "n": repeats}


def latency_ms(run: Callable[[], object], repeats: int, warmup: int = 3) -> float:
    """The median of single calls, each begun when the one before has ended."""
    times = []
    for _ in range(repeats + warmup):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[warmup:])


def host_ms(
    runs: Sequence[Callable[[], object]], *, in_a_row: int = 1
) -> list[dict[str, float]]:
    """What the host takes for a call of each of ``runs`` that never waits for the
    device.

    The stream sleeps while a few calls are issued behind it: few, since a full queue
    would make the host wait. Collectives that wait for other ranks on the host count as
    well. The runs take turns, since a host is faster at some moments than at others.

    Args:
        in_a_row: layers of a run, at most 6: so many launches fit into the queue of a
            stream that sleeps. Times are of one of them.
    """
    calls = max(1, 3 // in_a_row)
    for run in runs:
        for _ in range(5):
            run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(16):
        for run, of_run in zip(runs, times, strict=True):
            torch.cuda.synchronize()
            torch.cuda._sleep(int(1e8))  # clock cycles, some 50 ms
            for _ in range(calls):
                began = time.perf_counter()
                run()
                of_run.append((time.perf_counter() - began) * 1e3 / in_a_row)
    torch.cuda.synchronize()
    return [summary_of(of_run) for of_run in times]


def captured[Made](run: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
    """``run`` as a CUDA graph, and what ``run`` returned.

    Replays have no host between the launches. They write the tensors that were
    returned.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = run()
    return graph, made


def kernel_times(
    run: Callable[[], object], repeats: int = 5
) -> list[tuple[str, float, float]]:
    """``(name, launches, microseconds)`` per call of ``run``, the longest first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    found = [
        (e.key, e.count / repeats, e.self_device_time_total / repeats)
        for e in profile.key_averages()
        if e.self_device_time_total
    ]
    return sorted(found, key=lambda row: -row[2])


def print_kernels(of: str, times: list[tuple[str, float, float]], longest: int) -> None:
    total = sum(us for _, _, us in times)
    launches = sum(count for _, count, _ in times)
    print(f"\n{of}: {total:.0f} us in {launches:g} kernels per forward and backward")
    rows = [["us", "launches", "kernel"]]
    rows += [
        [f"{us:.0f}", f"{count:g}", key[:90]] for key, count, us in times[:longest]
    ]
    print(table(rows), flush=True)


def slowest(times: dict[str, float]) -> dict[str, float]:
    """Each entry of :func:`time_ms`, the largest of all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.tensor(list(times.values()), device=device, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(times, values.tolist(), strict=True))


def copy_bandwidth(size: int = 2 << 30) -> float:
    """Bytes per second of a device-to-device copy, counting bytes read and bytes
    written."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / (time_ms(lambda: target.copy_(source))["median"] * 1e-3)


def memory_mib(forward: Callable[[], torch.Tensor]) -> dict[str, float]:
    """What one forward leaves allocated (its output included), and the peak of
    forward+backward."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    return {
        "saved": saved / 2**20,
        "peak": (torch.cuda.max_memory_allocated() - before) / 2**20,
    }


def saved_mib(forward: Callable[[], torch.Tensor]) -> dict[str, float]:
    """What autograd saves in a forward on a CPU, each storage once. Nothing is dropped
    under these hooks."""
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = forward()
    del held
    return {"saved": sum(kept.values()) / 2**20}


def append_line(path: str, record: dict) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
