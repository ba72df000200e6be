"""A layer over a case: its forward and backward, timed and held to other layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megatron_gdn import set_documents, static_packed_seq_params

from .cases import Case
from .layers import Layer, Sizes, build, slow_gates, thd
from .measure import captured, memory_mib, saved_mib, time_of
from .model import DEVICE

# Two layers round to bf16 (2^-9) after each of some ten steps between input and output,
# and their errors are independent: one is at most this far from the other, relative to
# its size.
FURTHEST = 2 * 10 * 2**-9
# Documents that a graph has room for.
ROOM = 32


def with_backward(
    run: Callable[[], Tensor], module: nn.Module, x: Tensor
) -> Callable[[], None]:
    """``run`` and its backward, without gradients from before but those that
    ``main_grad`` holds."""
    grad = torch.randn_like(run())
    parameters = list(module.parameters())

    def both() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        run().backward(grad)

    return both


class Call:
    """A layer, and a case as its input."""

    def __init__(
        self, layer: Layer, sizes: Sizes, case: Case, x: Tensor, backend: str
    ) -> None:
        self.layer = layer
        self.case = case
        self.fused = (layer.linears or case.linears) == "te" and layer.fused
        self.module: Any = build(layer, sizes, backend, case.linears)
        if case.gates == "slow":
            slow_gates(self.module)
        if layer.whose == "fla":
            self.x = x.detach().transpose(0, 1).contiguous().requires_grad_()
        else:
            self.x = x
        self.packed = thd(case.offsets)

    @cached_property
    def both(self) -> Callable[[], None]:
        return with_backward(self.forward, self.module, self.x)

    def forward(self) -> Tensor:
        if self.layer.whose == "fla":
            offsets = self.case.offsets
            if offsets is not None:
                offsets = torch.tensor(offsets, device=DEVICE)
            return self.module(self.x, cu_seqlens=offsets)[0]
        with self.layer.context(self.module):
            return self.module(self.x, None, packed_seq_params=self.packed)[0]

    def results(self, passes: int = 1) -> dict[str, Tensor]:
        """Output and gradients of the last of these passes: delayed scaling has seen
        those before it."""
        out = self.x
        for _ in range(passes):
            torch.manual_seed(4)
            self.x.grad = None
            for parameter in self.module.parameters():
                parameter.grad = None
                if self.fused:
                    parameter.main_grad.zero_()
            out = self.forward()
            out.backward(torch.randn_like(out))
        assert self.x.grad is not None
        found = {"out": out.detach(), "x": self.x.grad}
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            if self.fused and parameter.main_grad.any():
                gradient = parameter.main_grad
            if gradient is not None:
                found[name] = gradient
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def time(self, run: Any, repeats: int) -> dict[str, float]:
        # plain torch is slow
        if self.layer.few:
            return time_of(run, min(repeats, 4), warmup=1)
        return time_of(run, repeats)

    def times(self, repeats: int) -> dict[str, Any]:
        """Times of the forward, and of forward and backward; memory in MiB."""
        made: dict[str, Any] = {
            "forward": self.time(self.forward, repeats),
            "forward_backward": self.time(self.both, repeats),
        }
        self.x.grad = None
        self.module.zero_grad()
        memory = memory_mib if DEVICE == "cuda" else saved_mib
        return made | memory(self.forward)

    @torch.no_grad()
    def alone(self, repeats: int) -> dict[str, Any]:
        """A forward that no backward follows: its time and its peak in MiB."""
        made: dict[str, Any] = {"alone": self.time(self.forward, repeats)}
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.forward()
            peak = torch.cuda.max_memory_allocated() - before
            made["alone_peak"] = peak / 2**20
        return made

    def graph(self, repeats: int) -> dict[str, Any]:
        """Forward and backward as a CUDA graph, and how many gradients have the bits
        of the eager step. Nothing for Megatron's layer on documents, which reads their
        boundaries on the host."""
        offsets = self.case.offsets
        if DEVICE == "cpu" or (offsets is not None and self.layer.whose != "ours"):
            return {}
        if offsets is not None:
            room = max(ROOM, len(offsets) - 1)
            self.packed = static_packed_seq_params(self.case.tokens, room)
            set_documents(self.packed, offsets)
        self.both()
        expected = [tensor.clone() for tensor in self._written()]
        replay, _ = captured(self.both)
        written = self._written()  # where replays write
        replay.replay()
        same = sum(map(torch.equal, written, expected))
        times = time_of(replay.replay, repeats)
        return {"graph": times, "same": same, "tensors": len(expected)}

    def _written(self) -> list[Tensor]:
        """The gradients of one step, without those that ``main_grad`` sums up."""
        found = [self.x.grad]
        for name, parameter in self.module.named_parameters():
            if not (self.fused and name.endswith("_proj.weight")):
                found.append(parameter.grad)
        return [gradient for gradient in found if gradient is not None]


@contextmanager
def strictly(layer: Layer) -> Iterator[None]:
    """Inside, torch's own switch is on if the layer is ``strict``."""
    torch.use_deterministic_algorithms(layer.strict)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Of tensors in both: the root mean square of the difference over that of what is
    exact. NaN stays NaN."""
    made = {}
    for name, right in exact.items():
        if name in found and right.any():
            wide = right.double()
            off = found[name].double() - wide
            made[name] = float(off.norm() / wide.norm())
    return made


def furthest(of: dict[str, float]) -> float:
    """The largest; NaN if one of them is NaN, as max() may not be."""
    return torch.tensor(list(of.values()), dtype=torch.float64).max().item()


def exact_results(call: Call, sizes: Sizes) -> dict[str, Tensor]:
    """What `Call.results` would be in fp64, in plain torch, with the weights of
    ``call``. A norm inside in_proj goes in front."""
    plain = Layer("exact", backend="reference")
    twin: nn.Module = build(plain, sizes, "reference", dtype=torch.float64)
    given = dict(call.module.named_parameters())
    for name, parameter in twin.named_parameters():
        parameter.data = given[name].detach().double()
    x = call.x.detach().double().requires_grad_()
    normed = x
    gamma = given.get("in_proj.layer_norm_weight")
    if gamma is not None:
        epsilon = call.module.config.layernorm_epsilon
        normed = torch.nn.functional.rms_norm(
            x, (sizes.hidden,), gamma.detach().double(), epsilon
        )
    out, _ = twin(normed, None, packed_seq_params=call.packed)
    torch.manual_seed(4)
    # In the layer's dtype, so that both have the same numbers.
    grad = torch.randn_like(out, dtype=call.x.dtype)
    out.backward(grad.double())
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad}
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found
