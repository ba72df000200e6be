"""The functions that a forward calls, and whose calls a training step makes.

    python benchmarks/run.py calls                    # one rank, a decode step
    torchrun --standalone --nproc-per-node 2 benchmarks/run.py calls    # cp 2
    torchrun --standalone --nproc-per-node 4 benchmarks/run.py step-calls

On a CPU, with gloo, local linears and the plain rule; ``--set packed=true``: three
documents. ``PYTHONPATH`` says which checkout is counted. A GPU's host makes the same
calls, except that a Triton kernel takes the place of the operations of a plain twin.

``calls`` counts the entries of this package's frames (a generator enters once per step)
in the third forward of the second of two layers over one shape, or in the third decode
step, without the arithmetic of plain twins.

``step-calls`` counts on rank 0 of tp 2, cp 2 with sequence parallelism, for the third
forward and backward of a small hybrid model and by owner: entries of functions, torch's
operations, autograd functions (nodes of the graph that Python implements), collectives
and their KiB. The owner of a call is the nearest function on its stack that belongs to
this package or to Megatron.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from lib.layers import start_megatron
from lib.model import gdn_sizes, transformer_config
from lib.session import Session
from parallel import start_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_gdn
from megatron_gdn.specs import gated_delta_net_spec, hybrid_stack_spec

TP = 2
CP = 2
TOKENS = 128
DOCUMENTS = [0, 32, 64, TOKENS]
# Files and functions of the plain rule's and front's arithmetic, in which a GPU has no
# part.
ARITHMETIC = (
    "ops/conv.py",
    "ops/elementwise.py",
    "ops/switches.py",
    "ops/front/plain.py",
    "ops/front/gates.py",
    "ops/front/table.py:Front.gates_of",
    "ops/rules/token_rule.py",
    "ops/delta_rule/chunk_math",
    "ops/delta_rule/plain.py",
    "ops/delta_rule/triangular.py",
    "ops/delta_rule/base.py",
    "ops/rules/chunk_table.py",
    "ops/state_maps/state_map.py",
    "ops/readout/base.py",
    "ops/layout.py",
    "ops/autograd.py",
)
# What stands in for CUDA is left out, too.
LEFT_OUT = (*ARITHMETIC, "compat/one_process.py")
# Owner of a file, by the beginning of its path below its package; the first counts.
OURS = {
    **dict.fromkeys(ARITHMETIC, "ours: plain arithmetic"),
    "ops/front/history.py": "ours: plain arithmetic",
    "context_parallel/agreement.py": "ours: checks of agreement",
    "mixers/packing.py": "ours: documents of the micro-batch",
    "mixers/loader_layout.py": "ours: documents of the micro-batch",
    "context_parallel/headwise": "ours: exchange of heads",
    "context_parallel/chunkwise": "ours: histories and states",
    "context_parallel/gathered.py": "attention",
    "mixers/attention.py": "attention",
    "compat": "Megatron: the rest",  # stand-ins for a GPU and for TE's norm
    "": "ours: stages of the layer",
}
MEGATRONS = {
    "tensor_parallel": "Megatron's linears",
    "transformer/attention": "attention",
    "transformer/dot_product": "attention",
    "": "Megatron: the rest",
}
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


def folder_of(package: Any) -> str:
    return os.path.dirname(package.__file__) + os.sep


def profiled(run: Callable[[], object], look: Callable[[Any, str, Any], None]) -> None:
    """Runs it; ``look`` is called as Python enters and leaves functions."""
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)


def entries_of(run: Callable[[], object]) -> dict[str, int]:
    """Entries of the package's functions, by ``file:function``, in the order of their
    first; without the arithmetic of the plain twins."""
    root = folder_of(megatron_gdn)
    entries: Counter[str] = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        file = code.co_filename.removeprefix(root)
        name = f"{file}:{code.co_qualname}"
        inside = file != code.co_filename
        if event == "call" and inside and not name.startswith(LEFT_OUT):
            entries[name] += 1

    profiled(run, look)
    return dict(entries)


def files_of(entries: dict[str, int]) -> set[str]:
    return {name.partition(":")[0] for name in entries}


def documents(packed: bool) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    if not packed:
        return None
    cu = torch.tensor(DOCUMENTS, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)


def steady_forward(cp: int, mode: str, packed: bool = False) -> dict[str, int]:
    """Of the second of two tiny layers over this process's group; every rank calls
    it."""
    from megatron.core.transformer.spec_utils import build_module

    config = transformer_config(
        24, torch.float32, **gdn_sizes(2, 4, 8), context_parallel_size=cp
    )
    options = {"backend": "reference"}
    if mode != "decode":
        options["linear_cp_mode"] = mode
    spec = gated_delta_net_spec("local", **options)
    first = build_module(spec, config, layer_number=1)
    if mode == "decode":
        return steady_step(first)
    later = build_module(spec, config, layer_number=2)
    params = documents(packed)
    x = torch.randn(TOKENS // cp, 1, 24, requires_grad=True)
    for _ in range(2):
        y, _ = first(x, None, packed_seq_params=params)
        later(y, None, packed_seq_params=params)[0].sum().backward()
    y, _ = first(x, None, packed_seq_params=params)
    return entries_of(lambda: later(y, None, packed_seq_params=params))


@torch.inference_mode()
def steady_step(layer: Any) -> dict[str, int]:
    """Of a token of two sequences in Megatron's static context."""
    from megatron.core.inference.contexts import StaticInferenceContext

    context = StaticInferenceContext(2, TOKENS)
    layer.eval()

    def feed(tokens: int) -> None:
        layer(torch.randn(tokens, 2, 24), inference_context=context)
        context.increment_sequence_len_offset(tokens)

    for tokens in (8, 1, 1):
        feed(tokens)
    return entries_of(lambda: feed(1))


class Counts(TorchDispatchMode):
    """Counts by owner while it is entered: calls, operations, functions, collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.roots = {folder_of(megatron_gdn): OURS}
        self.roots[folder_of(megatron.core)] = MEGATRONS
        self.found: dict[str, Any] = defaultdict(Counter)
        self.owners: dict[str, str | None] = {}

    def owner_of_file(self, path: str) -> str | None:
        """The owner of the file at ``path``; None for torch and for this script."""
        if path not in self.owners:
            self.owners[path] = None
            for root, owners in self.roots.items():
                if path.startswith(root):
                    name = path.removeprefix(root)
                    begins = (begin for begin in owners if name.startswith(begin))
                    self.owners[path] = owners[next(begins)]
        return self.owners[path]

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
        if frame.f_code.co_name not in COLLECTIVES:
            return
        found = self.found[self.owner(frame)]
        found["collectives"] += 1
        for name in ("input", "input_tensor", "tensor"):
            sent = frame.f_locals.get(name)
            if isinstance(sent, torch.Tensor):
                found["sent KiB"] += sent.nbytes / 1024


def count(run: Callable[[], None]) -> dict[str, Any]:
    counts = Counts()
    with counts:
        profiled(run, counts.look)
    return counts.found


def step_of(mode: str, layers: str, packed: bool) -> Callable[[], None]:
    """One forward and backward of a small model over this rank's process groups."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    config = transformer_config(
        32,
        torch.float32,
        **gdn_sizes(4, 8, 8),
        num_layers=len(layers),
        ffn_hidden_size=32,
        add_bias_linear=True,
        tensor_model_parallel_size=TP,
        context_parallel_size=CP,
        sequence_parallel=True,
    )
    spec = hybrid_stack_spec("local", linear_cp_mode=mode, backend="reference")
    model = HybridModel(config, spec, 32, TOKENS, hybrid_layer_pattern=layers)
    tokens = torch.arange(TOKENS // CP)[None] % 32
    params = documents(packed)

    def step() -> None:
        losses = model(tokens, tokens, None, labels=tokens, packed_seq_params=params)
        losses.sum().backward()

    return step


def calls(session: Session) -> None:
    """Of the schemes over the ranks of torchrun, or on one rank."""
    modes = {"one rank": "auto", "decode step": "decode"}
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks == 1:
        start_megatron()
    else:
        modes = {mode: mode for mode in ("headwise", "chunkwise")}
        session.writes = start_ranks()[0] == 0
    for name, mode in modes.items():
        entries = steady_forward(ranks, mode, session.row["packed"])
        record = {"calls": sum(entries.values()), "files": len(files_of(entries))}
        session.emit({"case": name, **record})
    dist.destroy_process_group()


def step_calls(session: Session) -> None:
    """Of the third step in each scheme."""
    session.writes = start_ranks(TP)[0] == 0
    for mode in ("headwise", "chunkwise"):
        step = step_of(mode, session.row["pattern"], session.row["packed"])
        step()
        step()
        found = count(step)
        for owner in sorted(found, key=lambda owner: -found[owner]["calls"]):
            session.emit({"case": mode, "layer": owner, **found[owner]})
    dist.destroy_process_group()
