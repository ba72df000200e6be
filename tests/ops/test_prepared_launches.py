"""Prepared launches: what they are kept by, and on a GPU the same bits as ordinary
ones."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from megatron_gdn.ops.kernels import launch as launches
from megatron_gdn.ops.kernels.launch import Launch, pointers_and_key


class At:
    """A tensor on a GPU, as far as a key looks at it."""

    def __init__(self, pointer: int, dtype=torch.float32, is_cuda: bool = True) -> None:
        self.pointer = pointer
        self.dtype = dtype
        self.is_cuda = is_cuda

    def data_ptr(self) -> int:
        return self.pointer


def test_a_key_tells_apart_what_triton_compiles_apart():
    several = [
        (At(32), At(64)),
        (At(32), At(64, torch.bfloat16)),
        (At(32), None),
        (None, At(32)),
        (At(32), At(68)),  # not a multiple of 16 bytes
        (At(36), At(64)),
        (At(36), At(68)),
        (At(36), None),
        (None, At(36)),
    ]
    keys = [pointers_and_key(tensors)[1] for tensors in several]
    assert len(set(keys)) == len(several)
    pointers, key = pointers_and_key((At(320), At(16)))
    assert pointers == [320, 16] and key == keys[0], "other addresses, the same kernel"
    assert len(key) == 2, "without alignments, since both tensors are aligned"
    assert pointers_and_key((At(32), None))[0] == [32, None]


def test_tensors_off_the_gpu_are_left_to_triton():
    assert pointers_and_key((At(32), At(64, is_cuda=False))) is None


def test_an_interpreted_kernel_is_launched_by_triton_every_time():
    """Not a compiled function: what ``triton.jit`` makes under TRITON_INTERPRET=1."""
    calls: list = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: calls.append((grid, args, constants))

    launch = Launch(Kernel(), (3, 2), 7, 1e-6, H=4, num_warps=2)
    x = torch.zeros(2)
    launch(x, None)
    launch(x, None)
    assert calls == [((3, 2), (x, None, 7, 1e-6), {"H": 4, "num_warps": 2})] * 2


@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)], ids=str)
def test_an_axis_that_a_grid_lacks_has_one_program(grid):
    assert Launch(print, grid, num_warps=4)._grid_axes == (*grid, 1, 1)[:3]


@pytest.mark.parametrize("place", ["kernel", "launch_enter_hook", "launch_exit_hook"])
def test_a_hook_at_any_place_is_seen(place):
    kernel = SimpleNamespace(pre_run_hooks=[])
    assert not launches._has_launch_hooks(kernel)
    if place == "kernel":
        kernel.pre_run_hooks.append(print)
        assert launches._has_launch_hooks(kernel)
        return
    hooks = getattr(launches.knobs.runtime, place)
    hooks.add(print)
    try:
        assert launches._has_launch_hooks(kernel)
    finally:
        hooks.remove(print)
    assert not launches._has_launch_hooks(kernel)


@pytest.fixture
def add_kernel():
    from megatron_gdn.ops.kernels import reduce

    return reduce._sum_rows_kernel


def sums_of(kernel, x, ordinary=False):
    N, M = x.shape
    launch = Launch(
        kernel,
        (-(-M // 128), 1),
        N,
        M,
        M,
        M,
        M,
        ROWS=8,
        REPEATS=-(-N // 8),
        BLOCK_M=128,
        num_warps=4,
    )
    launch._never_prepared = ordinary

    def run(y):
        launch(y, out := torch.full((1, M), 7.0, device="cuda"), None, None, None)
        return out

    return launch, run


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (5, 130), (16, 48)])
@pytest.mark.parametrize("shift", [0, 1, 4], ids="shift{}".format)
def test_the_same_bits_with_tensors_at_any_address(add_kernel, shape, shift):
    """The same launch sees aligned and misaligned tensors in turn."""
    memory = torch.randn(shape[0] * shape[1] + 8, device="cuda")
    views = [
        memory[at:][: shape[0] * shape[1]].view(shape) for at in (0, shift, 0, shift, 3)
    ]
    launch, prepared = sums_of(add_kernel, views[0])
    _, ordinary = sums_of(add_kernel, views[0], ordinary=True)
    for view in (*views, *views):
        assert torch.equal(prepared(view), ordinary(view))
    assert len(launch._prepared_launches) == 2, (
        "one kernel for multiples of 16 bytes, one for others"
    )


@pytest.mark.gpu
def test_a_prepared_launch_is_captured_and_replayed(add_kernel):
    x = torch.randn(40, 200, device="cuda")
    _, run = sums_of(add_kernel, x)
    run(x), run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, run(x))


@pytest.mark.gpu
def test_a_prepared_launch_is_queued_in_the_current_stream(add_kernel):
    x = torch.randn(40, 200, device="cuda")
    _, run = sums_of(add_kernel, x)
    exact = run(x)
    stream = torch.cuda.Stream()
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y.copy_(x)
        out = run(y)
    stream.synchronize()
    assert torch.equal(out, exact)


@pytest.mark.gpu
def test_hooks_see_every_launch(add_kernel):
    seen = []
    x = torch.randn(8, 8, device="cuda")
    _, run = sums_of(add_kernel, x)
    run(x), run(x)
    hook = launches.knobs.runtime.launch_enter_hook
    see = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    hook.add(see)
    try:
        run(x)
    finally:
        hook.remove(see)
    run(x)
    assert seen == ["_sum_rows_kernel"]
