"""Whose calls a training step makes on one rank of tp 2, cp 2 with sequence parallelism.

    python benchmarks/count_step.py                        # headwise and chunkwise
    python benchmarks/count_step.py --packed --layers GG   # three documents, two layers

On a CPU, four gloo ranks, local linears, the plain rule. Counted on rank 0 are, for
the third forward and backward of a small hybrid model and by owner: entries of Python
functions, torch's operations, autograd functions (nodes of the graph that Python
implements), collectives and their MiB. The owner of a call is the nearest function on
its stack that belongs to this package or to Megatron. A GPU's host makes the same
calls, except that a Triton kernel takes the place of the operations of a plain twin
(the row "plain arithmetic").
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from count_calls import ARITHMETIC, on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

TP = 2
CP = 2
TOKENS = 128
DOCUMENTS = (32, 32, 64)
COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all_single",
    "all_gather",
    "batch_isend_irecv",
    "broadcast",
)
# Owner of a file, by the beginning of its path below its package; the first counts.
OURS = (
    ("context_parallel/agreement.py", "ours: checks of agreement"),
    ("mixers/packing.py", "ours: documents of the micro-batch"),
    ("mixers/loader_layout.py", "ours: documents of the micro-batch"),
    ("context_parallel/headwise", "ours: exchange of heads"),
    ("context_parallel/chunkwise", "ours: histories and states"),
    ("context_parallel/gathered.py", "attention"),
    ("mixers/attention.py", "attention"),
    ("compat", "Megatron: the rest"),  # stand-ins for a GPU and for TE's norm
    ("ops/front/history.py", "ours: plain arithmetic"),
    ("", "ours: stages of the layer"),
)
MEGATRONS = (
    ("tensor_parallel", "Megatron's linears"),
    ("transformer/attention", "attention"),
    ("transformer/dot_product", "attention"),
    ("", "Megatron: the rest"),
)


class Counts(TorchDispatchMode):
    """Counts by owner while it is entered: calls, operations, functions, collectives."""

    def __init__(self, roots: dict[str, str]) -> None:
        super().__init__()
        self.roots = roots
        self.found: dict[str, Counter[str]] = defaultdict(Counter)
        self.owners: dict[str, str | None] = {}

    def owner_of_file(self, path: str) -> str | None:
        """The owner of the file at ``path``; None for torch and for this script."""
        if path in self.owners:
            return self.owners[path]
        owner = None
        if path.startswith(self.roots["ours"]):
            name = path[len(self.roots["ours"]) :]
            owner = next(owner for begin, owner in OURS if name.startswith(begin))
            if name.startswith(ARITHMETIC):
                owner = "ours: plain arithmetic"
        elif path.startswith(self.roots["megatron"]):
            name = path[len(self.roots["megatron"]) :]
            owner = next(owner for begin, owner in MEGATRONS if name.startswith(begin))
        self.owners[path] = owner
        return owner

    def owner(self, frame: Any) -> str:
        while frame is not None:
            owner = self.owner_of_file(frame.f_code.co_filename)
            if owner is not None:
                return owner
            frame = frame.f_back
        return "autograd"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[self.owner(sys._getframe(1))]["operations"] += 1
        return function(*args, **(kwargs or {}))

    def look(self, frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        owner = self.owner_of_file(code.co_filename)
        if owner is not None:
            self.found[owner]["calls"] += 1
            first = code.co_varnames[:1]
            if first == ("ctx",) and code.co_name in ("forward", "backward"):
                self.found[owner]["autograd functions"] += 1
        elif code.co_filename.endswith("distributed_c10d.py"):
            self.count_collective(frame)

    def count_collective(self, frame: Any) -> None:
        code = frame.f_code
        if code.co_name not in COLLECTIVES:
            return
        found = self.found[self.owner(frame)]
        found["collectives"] += 1
        for name in ("input", "input_tensor", "tensor"):
            sent = frame.f_locals.get(name)
            if isinstance(sent, torch.Tensor):
                found["bytes"] += sent.nbytes


def count(run: Callable[[], None]) -> dict[str, dict[str, int]]:
    import megatron.core

    import megatron_gdn

    roots = {
        "ours": os.path.dirname(megatron_gdn.__file__) + os.sep,
        "megatron": os.path.dirname(megatron.core.__file__) + os.sep,
    }
    counts = Counts(roots)
    with counts:
        sys.setprofile(counts.look)
        try:
            run()
        finally:
            sys.setprofile(None)
    return {owner: dict(found) for owner, found in counts.found.items()}


def step_of(mode: str, layers: str, packed: bool) -> Callable[[], None]:
    """One forward and backward of a small model over this rank's process groups."""
    import torch.nn.functional as F
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.specs import hybrid_stack_spec

    config = TransformerConfig(
        num_layers=len(layers),
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=F.silu,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        hidden_size=32,
        ffn_hidden_size=32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        tensor_model_parallel_size=TP,
        context_parallel_size=CP,
        sequence_parallel=True,
    )
    spec = hybrid_stack_spec("local", linear_cp_mode=mode, backend="reference")
    model = HybridModel(config, spec, 32, TOKENS, hybrid_layer_pattern=layers)
    local = TOKENS // CP
    tokens = torch.arange(local)[None] % 32
    params = None
    if packed:
        offsets = [0]
        for length in DOCUMENTS:
            offsets.append(offsets[-1] + length)
        cu = torch.tensor(offsets, dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)

    def step() -> None:
        losses = model(tokens, tokens, None, labels=tokens, packed_seq_params=params)
        losses.sum().backward()

    return step


def counts_of(modes: list[str], layers: str, packed: bool) -> dict[str, dict]:
    """The counts of the third step of each scheme."""
    found = {}
    for mode in modes:
        step = step_of(mode, layers, packed)
        step()
        step()
        found[mode] = count(step)
    return found


def table(found: dict[str, dict[str, int]]) -> str:
    """The counts as rows of a page's table; owners with most calls first."""
    columns = ("calls", "operations", "autograd functions", "collectives")
    lines = [f"| whose | {' | '.join(columns)} | sent KiB |", "| --- " * 6 + "|"]
    for owner in sorted(found, key=lambda owner: -found[owner].get("calls", 0)):
        counts = [str(found[owner].get(column, 0)) for column in columns]
        sent = f"{found[owner].get('bytes', 0) / 1024:.1f}"
        lines.append(f"| {owner} | {' | '.join(counts)} | {sent} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packed", action="store_true", help="three documents")
    parser.add_argument("--layers", default="G-G-G-*-", help="a hybrid pattern")
    parser.add_argument("--modes", nargs="+", default=["headwise", "chunkwise"])
    args = parser.parse_args()
    found_by_mode = on_ranks(
        counts_of, TP * CP, args.modes, args.layers, args.packed, tp=TP
    )
    for mode, found in found_by_mode.items():
        print(f"{mode}, layers {args.layers}{', packed' * args.packed}\n")
        print(table(found) + "\n")


if __name__ == "__main__":
    main()
