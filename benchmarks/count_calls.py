"""The way of ``forward``: Python functions of this package that one steady forward
calls.

    python benchmarks/count_calls.py         # calls, functions and files per scheme
    python benchmarks/count_calls.py --list  # and the functions in the order of first
                                             # call

On the CPU with the plain rule: one rank, a decode step, two ranks headwise and
chunkwise. ``PYTHONPATH`` says which checkout is counted. Counted is every entry of a
frame (a generator enters once per step) in the third forward of the second of two
layers over one shape, or in the third decode step; what it calls of torch and Megatron
is not.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Files and functions of the plain rule's and front's arithmetic, in which a GPU has no
# part.
ARITHMETIC = (
    "ops/conv.py",
    "ops/elementwise.py",
    "ops/switches.py",
    "ops/front/plain.py",
    "ops/front/gates.py",
    "ops/front/table.py:Front.gates_of",
    "ops/front/table.py:TableFront.gates_of",  # of older checkouts
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
SCHEMES = {
    "one rank": (1, "auto"),
    "headwise": (2, "headwise"),
    "chunkwise": (2, "chunkwise"),
    "decode step": (1, "decode"),
}
TOKENS = 128
# What stands in for CUDA on a CPU, also in older checkouts.
_STAND_INS = ("compat/one_process.py", "megatron_on_cpu.py")


class Way(NamedTuple):
    """Entries of functions, by ``file:function``, in the order of their first."""

    entries: dict[str, int]

    @property
    def calls(self) -> int:
        return sum(self.entries.values())

    @property
    def own(self) -> int:
        """Calls without the arithmetic of the plain twins."""
        return sum(
            n for name, n in self.entries.items() if not name.startswith(ARITHMETIC)
        )

    @property
    def own_files(self) -> int:
        """Files of the calls that :attr:`own` counts."""
        names = [name for name in self.entries if not name.startswith(ARITHMETIC)]
        return len({name.split(":")[0] for name in names})

    @property
    def files(self) -> int:
        return len({name.split(":")[0] for name in self.entries})


def way_of(run) -> Way:
    """The functions of the package that ``run`` enters in this thread."""
    import megatron_gdn

    root = os.path.dirname(megatron_gdn.__file__) + os.sep
    entries: Counter[str] = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        name = code.co_filename
        if event == "call" and name.startswith(root) and not name.endswith(_STAND_INS):
            entries[f"{code.co_filename[len(root) :]}:{code.co_qualname}"] += 1

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Way(dict(entries))


def steady_way(cp: int, mode: str, packed: bool = False) -> Way:
    """Of the second of two tiny layers over this process's group; every rank calls
    it."""
    import torch.nn.functional as F
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.specs import gated_delta_net_spec

    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=F.silu,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        hidden_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        context_parallel_size=cp,
    )
    spec = gated_delta_net_spec("local")
    options = {"backend": "reference"}
    if mode != "decode":
        options["linear_cp_mode"] = mode
    spec = ModuleSpec(module=spec.module, params=options, submodules=spec.submodules)
    first = build_module(spec, config, layer_number=1)
    params = None
    if packed:
        cu = torch.tensor([0, 32, 64, TOKENS], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    if mode == "decode":
        return steady_step(first)
    later = build_module(spec, config, layer_number=2)
    x = torch.randn(TOKENS // cp, 1, 24, requires_grad=True)
    for _ in range(2):
        y, _ = first(x, None, packed_seq_params=params)
        later(y, None, packed_seq_params=params)[0].sum().backward()
    y, _ = first(x, None, packed_seq_params=params)
    return way_of(lambda: later(y, None, packed_seq_params=params))


@torch.inference_mode()
def steady_step(layer: Any) -> Way:
    """Of a token of two sequences in Megatron's static context."""
    from megatron.core.inference.contexts import StaticInferenceContext

    context = StaticInferenceContext(2, TOKENS)
    layer.eval()

    def feed(tokens: int) -> None:
        layer(torch.randn(tokens, 2, 24), inference_context=context)
        context.increment_sequence_len_offset(tokens)

    for tokens in (8, 1, 1):
        feed(tokens)
    return way_of(lambda: feed(1))


def start(rank: int, ranks: int, port: int, tp: int = 1) -> None:
    """Megatron over gloo; ranks that are not tensor parallel are context parallel."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        from megatron_gdn.compat.one_process import run_megatron_on_cpu
    except ImportError:  # of older checkouts
        from megatron_gdn.megatron_on_cpu import run_megatron_on_cpu  # pyright: ignore

    run_megatron_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tp, context_parallel_size=ranks // tp)
    model_parallel_cuda_manual_seed(1)


def _rank(
    rank: int, ranks: int, port: int, tp: int, queue: Any, function: Any, args: tuple
) -> None:
    start(rank, ranks, port, tp)
    found = function(*args)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(function: Any, ranks: int, *args: Any, tp: int = 1) -> Any:
    """What ``function(*args)`` returns on rank 0; every rank calls it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (ranks, port, tp, queue, function, args), ranks)
    return queue.get()


def ways_of(ranks: int, packed: bool) -> dict[str, dict[str, int]]:
    """Entries of the schemes over so many ranks."""
    modes = {name: mode for name, (cp, mode) in SCHEMES.items() if cp == ranks}
    return {
        name: steady_way(ranks, mode, packed).entries for name, mode in modes.items()
    }


def count(packed: bool) -> dict[str, Way]:
    """The ways of all schemes, as rank 0 goes them."""
    ways = {}
    for ranks in sorted({ranks for ranks, _ in SCHEMES.values()}):
        found = on_ranks(ways_of, ranks, ranks, packed)
        ways |= {name: Way(entries) for name, entries in found.items()}
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packed", action="store_true", help="three documents")
    parser.add_argument("--list", action="store_true", help="every function")
    args = parser.parse_args()
    for name, way in count(args.packed).items():
        print(
            f"{name}: {way.calls} calls ({way.own} in {way.own_files} files "
            "without the plain arithmetic), "
            f"{len(way.entries)} functions, {way.files} files"
        )
        if args.list:
            for function, times in way.entries.items():
                print(f"    {function}" + (f" x{times}" if times > 1 else ""))


if __name__ == "__main__":
    main()
