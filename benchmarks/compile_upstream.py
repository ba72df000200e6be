"""Fills FlashQLA's compile cache for megatron-core's layer, with or without a GPU.

    python3 benchmarks/compile_upstream.py 32 8
    TILELANG_CACHE_DIR=kernels python3 benchmarks/compile_upstream.py 32 8

megatron-core repeats key heads and gives beta in bf16, so it takes other kernels than
our layer, which ``python -m megatron_gdn.warm_up`` compiles. The arguments are heads of
one rank: of 16:32, one GPU has 32 and each of four context-parallel ranks 8. Kernels
are compiled for Hopper: for packed documents, for a sequence that is cut into parts and
for a batch of four rows.
"""

from __future__ import annotations

import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from megatron_gdn.gdn.flash_qla.plan import flash_qla_module
from megatron_gdn.warm_up.absent_gpu import simulated_hopper
from megatron_gdn.warm_up.tasks import Task, recorded_kernels, run_tasks

TOKENS = 9000
# documents of which one is cut into parts; documents too short for it; batch rows, which
# FlashQLA does not cut
OFFSETS = ([0, 1000, TOKENS], list(range(0, TOKENS + 1, 500)), [])


def call(heads: int, offsets: list[int]) -> None:
    """Forward and backward as megatron-core calls them: q, k, v and beta in bf16, g in
    fp32."""
    import flash_qla  # pyright: ignore[reportMissingImports]

    rows, tokens = (1, TOKENS) if offsets else (4, 200)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(rows, tokens, heads, *shape, dtype=dtype, requires_grad=True)

    o, _ = flash_qla.chunk_gated_delta_rule(
        q=zeros(128),
        k=zeros(128),
        v=zeros(128),
        g=zeros(dtype=torch.float32),
        beta=zeros(),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32) if offsets else None,
        auto_cp=True,
    )
    o.backward(torch.zeros_like(o))


def tasks_of(heads: int) -> list[Task]:
    with recorded_kernels() as noted:
        for offsets in OFFSETS:
            call(heads, offsets)
    kernels = [task for task in noted.values() if task.kind == "flash_qla"]
    return sorted(kernels, key=lambda task: "fused" not in task.name)  # slow ones first


def main() -> None:
    with simulated_hopper():
        flash_qla_module()  # puts the fences in, before the kernels are noted
        tasks = [task for heads in sys.argv[1:] for task in tasks_of(int(heads))]
        _, failures = run_tasks(tasks, None)
    for name, error in failures.items():
        print(f"{name}:\n{error}")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
