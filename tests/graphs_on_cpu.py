"""Megatron's local CUDA graphs of layers without a GPU: a replay runs the layer
again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from megatron.core.transformer import cuda_graphs

_Runner = cuda_graphs._CudaGraphRunner
_create_forward = _Runner.create_fwd_graph
_create_backward = _Runner.create_bwd_graph


def _forward_of(runner: Any, *args: Any, **kwargs: Any) -> None:
    _create_forward(runner, *args, **kwargs)

    def replay() -> None:
        given = runner.fwd_graph_input_surface[: runner.num_dgrads]
        runner.leaves = [
            x.detach().clone().requires_grad_(x.requires_grad) for x in given
        ]
        leaves = iter(runner.leaves)
        with capturing_by_megatron(), torch.enable_grad():
            args, kwargs = cuda_graphs.tree_map(
                lambda x: next(leaves) if torch.is_tensor(x) else x,
                [runner.fwd_graph_input_args, runner.fwd_graph_input_kwargs],
            )
            runner.made = runner.get_tensors(runner.func(*args, **kwargs))
        for to, x in zip(runner.fwd_graph_output_surface, runner.made, strict=True):
            to.data.copy_(x.data)

    runner.fwd_graph.replay = replay


def _backward_of(runner: Any) -> None:
    _create_backward(runner)

    def replay() -> None:
        leaves = [x for x in runner.leaves if x.requires_grad]
        grads = torch.autograd.grad(
            [x for x in runner.made if x.requires_grad],
            [*leaves, *runner.params_to_backprop],
            [x for x in runner.static_grad_outputs if x is not None],
            allow_unused=True,
        )
        for param, grad in zip(
            runner.params_to_backprop, grads[len(leaves) :], strict=True
        ):
            if grad is not None:
                param.main_grad.add_(grad)
        of_leaves = iter(grads)
        for to in runner.static_grad_inputs:
            if to is not None:
                to.data.copy_(next(of_leaves))

    runner.bwd_graph.replay = replay


@contextmanager
def graphs_on_cpu() -> Iterator[None]:
    """Models with ``cuda_graph_impl="local"`` are built and trained inside."""
    on_cuda = {
        "CUDAGraph": MagicMock,
        "Event": MagicMock,
        "Stream": MagicMock(),
        "graph": lambda *_, **__: nullcontext(),
        "graph_pool_handle": lambda: 0,
        "synchronize": lambda: None,
        "set_stream": lambda _: None,
        "default_stream": lambda: None,
        "current_stream": MagicMock(),
        "memory_stats": lambda: dict.fromkeys(
            ("allocated_bytes.all.current", "reserved_bytes.all.current"), 0
        ),
    }
    tracker = MagicMock(is_inference_rng_tracker=True)
    with ExitStack() as stack:
        for name, stand_in in on_cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        for name, stand_in in {
            "alloc_tensor_from_graph_mempool": lambda described: described.zeros_like(),
            "make_weakref": lambda x, inplace=True: x,
            "get_all_rng_states": dict,
            "get_cuda_rng_tracker": lambda: tracker,
        }.items():
            stack.enter_context(patch.object(cuda_graphs, name, stand_in))
        stack.enter_context(patch.object(_Runner, "create_fwd_graph", _forward_of))
        stack.enter_context(patch.object(_Runner, "create_bwd_graph", _backward_of))
        stack.callback(cuda_graphs.delete_cuda_graphs)
        yield


@contextmanager
def capturing_by_megatron() -> Iterator[None]:
    """As in its ``create_cudagraphs``, around warm-up and capture."""
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()


def captured_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's graphs give a layer to capture in the place of these arguments:
    zeros."""
    described = cuda_graphs.tree_map(
        lambda x: cuda_graphs.ArgMetadata(x) if torch.is_tensor(x) else x, arguments
    )
    with capturing_by_megatron():
        return cuda_graphs.tree_map(
            lambda x: x.zeros_like() if isinstance(x, cuda_graphs.ArgMetadata) else x,
            described,
        )


def mismatches(arguments: dict[str, Any], captured: dict[str, Any]) -> list[str]:
    """Why Megatron would not replay a graph that was recorded with ``captured`` for
    these."""
    runner = object.__new__(cuda_graphs._CudaGraphRunner)
    torch.nn.Module.__init__(runner)
    runner.fwd_graph_input_arg_metas = []
    runner.fwd_graph_input_kwarg_metas = {
        name: cuda_graphs.ArgMetadata(x) for name, x in captured.items()
    }
    return runner.get_mismatch_errors((), arguments)
