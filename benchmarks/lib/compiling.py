"""Compiles launches of Triton kernels for Hopper, with or without a GPU, and reads the result."""

from __future__ import annotations

import re
import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.compiler.compiler
from triton.runtime.jit import JITFunction

from megatron_gdn.mamba2.front import mamba2_front
from megatron_gdn.mamba2.sizes import Mamba2Dims
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.readout.kernels import TritonReadout
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.warm_up.hopper import HopperDriver
from megatron_gdn.warm_up.mixer_kernels import MixerLaunches


class _Clock:
    @staticmethod
    def time() -> float:
        """Processor time of this process and its children: ptxas is one."""
        who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(sum(resource.getrusage(one)[:2]) for one in who)


@dataclass
class Compilation:
    kernel: str
    stages: dict[str, float]  # seconds
    asm: dict[str, str | bytes] = field(repr=False)
    shared: int
    registers: int
    stack: int

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


def nvidia_tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(triton.knobs.nvidia, name).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def compile_for_hopper() -> Iterator[list[Compilation]]:
    """Inside, launches of kernels compile them and nothing more; the list fills with what they do.

    The cache is empty to begin with: a launch adds to the list if no earlier one compiled the same.
    """
    done, times, launch = [], [], JITFunction.run

    def run(self: JITFunction, *args, grid, warmup, **kwargs):
        before = len(times)
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        for timed in times[before:]:
            stages = {"ast": timed.ir_initialization, **dict(timed.lowering_stages)}
            usage = nvidia_tool("cuobjdump", kernel.asm["cubin"], "-res-usage")
            registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
            done.append(
                Compilation(
                    self.fn.__name__, {name: us / 1e6 for name, us in stages.items()},
                    kernel.asm, kernel.metadata.shared, registers, stack,
                )
            )  # fmt: skip
        return kernel

    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict("os.environ", TRITON_CACHE_DIR=cache),
        patch.object(triton.runtime.driver, "_active", HopperDriver()),
        patch.object(triton.compiler.compiler, "time", _Clock),
        patch.object(
            triton.knobs.compilation, "listener", lambda **event: times.append(event["times"])
        ),
        patch.object(JITFunction, "run", run),
    ):
        yield done


class Problem(MixerLaunches):
    """The launches of a Gated DeltaNet mixer with heads of 128, and those of a Mamba2 mixer."""

    def __init__(
        self, tokens: int, heads: tuple[int, int], documents: int = 0, **options: Any
    ) -> None:
        super().__init__(tokens, HeadSizes(*heads, 128, 128), documents, **options)

    def mamba2(self, batch_invariant: bool = False) -> None:
        """The launches of a Mamba2 mixer with 128 heads of 64 and 8 groups of 128."""
        tokens, dims = len(self.proj), Mamba2Dims(
            hidden_size=4096, num_heads=128, num_groups=8, head_dim=64, state_dim=128,
            conv_kernel_dim=4,
        )  # fmt: skip
        layout, per_head = dims.layout, (self.tensor(128, dtype=torch.float32),) * 3
        proj, weight = self.tensor(tokens, 1, layout.width), self.tensor(layout.conv_width, 1, 4)
        parameters = (weight, self.tensor(layout.conv_width), *per_head)
        d_proj = torch.empty_like(proj)
        front = mamba2_front(
            self.device, proj.dtype, 4, layout, bits=Bits(batch_invariant), kernels="triton"
        )  # fmt: skip
        made = front.forward(proj, parameters, self.documents)
        front.backward(proj, parameters, made, d_proj, self.documents)
        readout = TritonReadout(layout.gate_columns, groups=dims.num_groups)
        gamma = self.tensor(dims.d_inner)
        out = readout.forward(made[0], proj, gamma)
        readout.backward(out, made[0], proj, gamma, d_proj)


def loops(compilation: Compilation) -> list[Counter[str]]:
    """The instructions of every innermost loop, by name; of loads and stores with their width."""
    listing = nvidia_tool("nvdisasm", compilation.asm["cubin"], "-c")
    names, labels, found = [], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif one := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?(\w+)(\S*)(.*)", line):
            name, options, operands = one.groups()
            width = re.search(r"\.(64|128)\b", options)
            names.append(name + (width[1] if width and name[:2] in ("LD", "ST") else ""))
            target = re.search(r"\.(L_x_\d+)", operands) if name == "BRA" else None
            if target and labels.get(target[1], len(names)) < len(names) - 8:
                found.append(Counter(names[labels[target[1]] :]))
    return found
