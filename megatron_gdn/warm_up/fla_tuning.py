"""Tunes fla's kernels: fla tunes by timing, so they run forward and backward, on the GPU.

fla keeps its choices in Triton's cache (unless FLA_CACHE_RESULTS=0), per heads, dims and lengths.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from ..gdn.rule import resolve_rule
from ..ops.delta_rule.base import HeadSizes, RuleInputs
from ..ops.documents import Documents
from .needs import Share

_TOKENS = (8192, 2048)


def tune(shares: list[Share], sizes: HeadSizes, visible: str | None) -> int:
    """Tune in a new process, because this one hides the GPUs that were ``visible``."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    heads = [f"{share}:{sizes.key_dim}:{sizes.value_dim}" for share in shares]
    command = [sys.executable, "-m", __name__, *heads]
    return subprocess.run(command, env=environment, check=False).returncode


def run_rule(sizes: HeadSizes, tokens: int) -> None:
    """fla's forward and backward, dense and packed, in bf16."""
    rule = resolve_rule("fla", device="cuda", dtype=torch.bfloat16, sizes=sizes).rule

    def zeros(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or rule.operand_dtype or torch.bfloat16
        return torch.zeros(1, tokens, *shape, dtype=dtype, device="cuda")

    G, H, K, V = sizes
    gates = (zeros(H, dtype=torch.float32) for _ in range(2))
    inputs = RuleInputs(zeros(G, K), zeros(G, K), zeros(H, V), *gates)
    d_o = zeros(H, V, dtype=torch.bfloat16)
    packed = Documents.from_cu_seqlens([0, tokens // 3, tokens], tokens, device="cuda")
    for documents in (None, packed):
        saved = rule.begin(inputs, documents).run().saved
        rule.begin_backward(d_o, inputs, saved, documents).run()
    torch.cuda.synchronize()


def main(heads: list[str]) -> int:
    if not torch.cuda.is_available():
        print("error: fla's kernels are tuned on a GPU, and there is none here.", file=sys.stderr)
        return 2
    try:
        for text in heads:
            for tokens in _TOKENS:
                run_rule(HeadSizes(*map(int, text.split(":"))), tokens)
            print(f"fla is tuned for {text.rpartition(':')[0]}", flush=True)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
