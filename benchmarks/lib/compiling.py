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
from dataclasses import dataclass, field, replace
from functools import cache, partial
from unittest.mock import patch

import torch
import triton
import triton.compiler.compiler
from triton.runtime.jit import JITFunction

from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.mamba2.front import mamba2_table
from megatron_gdn.mamba2.sizes import Mamba2Dims
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front.plain import front_of
from megatron_gdn.ops.readout.kernels import TritonReadout
from megatron_gdn.ops.rules.base import Bits
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


class Problem:
    """Tensors of one shape in bf16, and the launches of a mixer with heads of 128 on
    them.

    ``documents`` are packed into the one row; ``operands`` is the dtype of q, k, v and
    their gradients. On the meta device the tensors have no memory, which is enough to
    compile.
    """

    def __init__(
        self,
        tokens: int,
        heads: tuple[int, int],
        documents: int = 0,
        *,
        batch: int = 1,
        taps: int = 4,
        operands: torch.dtype = torch.bfloat16,
        device: str = "meta",
    ) -> None:
        sizes = HeadSizes(*heads, 128, 128)
        self.sizes = sizes
        self.device = device
        normal = self.tensor
        _, H, K, V = sizes
        S = tokens
        B = batch
        self.documents = None
        if documents:
            offsets = [n * S // documents for n in range(documents)] + [S]
            where = "cpu" if device == "meta" else device
            self.documents = Documents.from_cu_seqlens(offsets, S, device=where)
        self.operands = operands
        half = operands == torch.float16
        self.proj, self.d_proj = (
            normal(S, B, sizes.layout.width),
            normal(S, B, sizes.layout.width),
        )
        per_head = partial(normal, H, dtype=torch.float32)
        front = front_of(
            gdn_table(sizes.layout),
            device,
            self.proj.dtype,
            taps,
            "triton",
            operands=operands if half else None,
        )
        self.front = cache(partial(replace, front))  # with other options
        self.parameters = (
            normal(sizes.layout.conv_width, 1, taps),
            None,
            per_head(),
            per_head(),
        )
        # FlashQLA gives dq and dk per value head; the front sums them.
        q, k, v = (normal(B, S, H, width, dtype=operands) for width in (K, K, V))
        g, beta = (normal(B, S, H, dtype=torch.float32) for _ in range(2))
        self.grads = RuleGrads(q, k, v, g, beta, factor=per_head() if half else None)
        self.o, self.d_out = normal(B, S, H, V, dtype=operands), normal(S, B, H * V)
        self.gamma, self.readout = normal(V), TritonReadout(sizes.layout.gate_columns)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def forward(self, only=None, history=None, **options) -> None:
        given = (self.parameters, self.documents, only, history)
        self.front(**options).forward(self.proj, *given)

    def backward(self, history=None, **options) -> None:
        given = (self.parameters, self.grads, self.d_proj, self.documents, history)
        self.front(**options).backward(self.proj, *given)

    def norm_forward(self) -> None:
        self.readout.forward(self.o, self.proj, self.gamma)

    def norm_backward(self, **options) -> None:
        self.readout.backward(
            self.d_out, self.o, self.proj, self.gamma, self.d_proj, **options
        )

    def norms(self, **_options) -> None:
        self.norm_forward()
        self.norm_backward()

    def mamba2(self, batch_invariant: bool = False) -> None:
        """The launches of a Mamba2 mixer with 128 heads of 64 and 8 groups of 128."""
        tokens = len(self.proj)
        dims = Mamba2Dims(
            hidden_size=4096,
            num_heads=128,
            num_groups=8,
            head_dim=64,
            state_dim=128,
            conv_kernel_dim=4,
        )
        layout = dims.layout
        per_head = (self.tensor(128, dtype=torch.float32),) * 3
        proj = self.tensor(tokens, 1, layout.width)
        weight = self.tensor(layout.conv_width, 1, 4)
        parameters = (weight, self.tensor(layout.conv_width), *per_head)
        d_proj = torch.empty_like(proj)
        bits = Bits(batch_invariant)
        front = front_of(
            mamba2_table(layout), self.device, proj.dtype, 4, "triton", bits
        )
        made = front.forward(proj, parameters, self.documents)
        front.backward(proj, parameters, made, d_proj, self.documents)
        readout = TritonReadout(layout.gate_columns, groups=dims.num_groups)
        gamma = self.tensor(dims.d_inner)
        out = readout.forward(made[0], proj, gamma)
        readout.backward(out, made[0], proj, gamma, d_proj)


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
