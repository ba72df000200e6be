"""Compiles launches of Triton kernels for Hopper, with or without a GPU, and reads the
result."""

from __future__ import annotations

import re
import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import triton
import triton.compiler.compiler
from triton.runtime.jit import JITFunction

from megatron_gdn.warm_up.absent_gpu import HopperDriver


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
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout


@contextmanager
def compile_for_hopper() -> Iterator[list[Compilation]]:
    """Inside, launches of kernels compile them and nothing more; the list fills with
    what they do.

    The cache is empty to begin with: a launch adds to the list if no earlier one
    compiled the same.
    """
    done = []
    times = []
    launch = JITFunction.run

    def run(self: JITFunction, *args, grid, warmup, **kwargs):
        before = len(times)
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        for timed in times[before:]:
            stages = {"ast": timed.ir_initialization, **dict(timed.lowering_stages)}
            usage = nvidia_tool("cuobjdump", kernel.asm["cubin"], "-res-usage")
            registers, stack = map(
                int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
            )
            done.append(
                Compilation(
                    self.fn.__name__,
                    {name: us / 1e6 for name, us in stages.items()},
                    kernel.asm,
                    kernel.metadata.shared,
                    registers,
                    stack,
                )
            )
        return kernel

    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict("os.environ", TRITON_CACHE_DIR=cache),
        patch.object(triton.runtime.driver, "_active", HopperDriver()),
        patch.object(triton.compiler.compiler, "time", _Clock),
        patch.object(
            triton.knobs.compilation,
            "listener",
            lambda **event: times.append(event["times"]),
        ),
        patch.object(JITFunction, "run", run),
    ):
        yield done


def loops(compilation: Compilation) -> list[Counter[str]]:
    """The instructions of every innermost loop, by name; of loads and stores with their
    width."""
    listing = nvidia_tool("nvdisasm", compilation.asm["cubin"], "-c")
    names = []
    labels = {}
    found = []
    for line in listing.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif one := re.match(
            r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?(\w+)(\S*)(.*)", line
        ):
            name, options, operands = one.groups()
            width = re.search(r"\.(64|128)\b", options)
            names.append(
                name + (width[1] if width and name[:2] in ("LD", "ST") else "")
            )
            target = re.search(r"\.(L_x_\d+)", operands) if name == "BRA" else None
            if target and labels.get(target[1], len(names)) < len(names) - 8:
                found.append(Counter(names[labels[target[1]] :]))
    return found
