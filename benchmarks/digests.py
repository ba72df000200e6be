"""sha256 digests of a layer's output and of every gradient, to show that a change keeps
every bit.

    python benchmarks/digests.py write before.json            # in a checkout before the
                                                              # change
    python benchmarks/digests.py write after.json             # and after it
    python benchmarks/digests.py compare before.json after.json

``PYTHONPATH`` says which checkout's package is measured, so one copy of this file
serves both. On the CPU it covers mixer x sequence layout x scheme x packed or not x
tensor-parallel size x dtype, over up to four gloo ranks, with the plain rule, and what
a static context generates. ``--device cuda`` covers one GPU per rank instead: flash_qla
(fp16 and bf16 operands, deterministic) and the plain rule.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lib.processes import in_processes

TINY = {
    "hidden_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "mamba_num_heads": 8,
    "mamba_num_groups": 4,
    "mamba_head_dim": 6,
    "mamba_state_dim": 5,
}
ON_GPU = {
    "hidden_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
ANY_LENGTHS = (3, 0, 150, 36, 3)
DIVISIBLE = (16, 0, 136, 8, 32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True, "conv_bias": True},
    "recompute": {"recompute": "light"},
    "full": {"recompute": "full"},
}
SPECS = {"gdn": "gated_delta_net", "kda": "kimi_delta_attention", "mamba2": "mamba2"}
RANKS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))


class Case(NamedTuple):
    """One layer over one micro-batch."""

    tp: int
    cp: int
    mode: str
    layout: str
    packed: bool
    dtype: str
    options: str = "plain"
    backend: str = "reference"
    operands: str = "fp16"
    deterministic: bool = False
    tokens: int = 192
    mixer: str = "gdn"

    @property
    def lengths(self) -> tuple[int, ...] | None:
        if not self.packed:
            return None
        of_192 = ANY_LENGTHS
        if self.layout == "zigzag" and self.cp > 1:
            of_192 = DIVISIBLE
        return tuple(n * self.tokens // 192 for n in of_192)

    @property
    def name(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._asdict().items())


def cpu_cases() -> Iterator[Case]:
    dtypes = ("float32", "bfloat16", "float64")
    for dtype, packed, (tp, cp) in product(dtypes, (False, True), RANKS):
        modes = ("headwise", "chunkwise")
        layouts = ("zigzag", "zigzag_buffer", "contiguous")
        if cp == 1:
            modes = ("auto",)
            layouts = ("zigzag",)
        for mode, layout in product(modes, layouts):
            case = Case(tp, cp, mode, layout, packed, dtype)
            yield case
            if layout != "zigzag_buffer":
                yield case._replace(mixer="kda")
                yield case._replace(mixer="mamba2")
            if dtype == "float32":
                for options in ("biases", "recompute", "full"):
                    yield case._replace(options=options)
                if layout == "zigzag":
                    yield case._replace(options="full", mixer="kda")
            if dtype == "bfloat16":
                yield case._replace(options="biases", deterministic=True)


def gpu_cases(ranks: int) -> Iterator[Case]:
    modes = ("headwise", "chunkwise") if ranks > 1 else ("auto",)
    for mode, packed in product(modes, (False, True)):
        for options in ("plain", "biases", "recompute"):
            case = Case(1, ranks, mode, "zigzag", packed, "bfloat16", options)
            case = case._replace(tokens=4096)
            yield case
            case = case._replace(backend="flash_qla")
            yield case
            yield case._replace(operands="bf16")
            yield case._replace(operands="bf16", deterministic=True)


def digest(*tensors: torch.Tensor | None) -> str:
    found = hashlib.sha256()
    for x in tensors:
        if x is not None:
            found.update(str((x.dtype, tuple(x.shape))).encode())
            found.update(
                x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            )
    return found.hexdigest()[:16]


def layer_of(case: Case, device: torch.device, groups: dict[tuple, Any]) -> Any:
    import torch.nn.functional as F
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn import specs

    dtype = getattr(torch, case.dtype)
    cp_rank, tp_rank = divmod(dist.get_rank(), case.tp)
    tp_group = groups[tuple(cp_rank * case.tp + t for t in range(case.tp))]
    cp_group = groups[tuple(c * case.tp + tp_rank for c in range(case.cp))]
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=F.silu,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        init_method_std=0.2,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        deterministic_mode=case.deterministic,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        linear_conv_kernel_dim=4,
        **(ON_GPU if device.type == "cuda" else TINY),
    )
    torch.manual_seed(11)
    spec = getattr(specs, f"{SPECS[case.mixer]}_spec")("local")
    options = {
        "cp_layout": case.layout,
        "linear_cp_mode": case.mode,
        "backend": case.backend,
        **OPTIONS[case.options],
    }
    width = {"d_model": config.hidden_size} if case.mixer == "mamba2" else {}
    if case.mixer == "gdn":
        options["rule_operands"] = case.operands
    layer = build_module(
        ModuleSpec(module=spec.module, params=options, submodules=spec.submodules),
        config,
        layer_number=1,
        **width,
        pg_collection=ProcessGroupCollection(tp=tp_group, cp=cp_group),
    ).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_((torch.randn(parameter.shape) * 0.1).to(parameter))
    return layer


def run(
    case: Case, device: torch.device, groups: dict[tuple, dist.ProcessGroup]
) -> dict[str, str]:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_gdn import SequenceLayout
    from megatron_gdn.context_parallel import local_indices

    layer = layer_of(case, device, groups)
    lengths = case.lengths
    packed = None
    tokens = case.tokens
    rows = 2
    if lengths is not None:
        tokens = sum(lengths)
        rows = 1
        cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    torch.manual_seed(5)
    x, weight = (torch.randn(tokens, rows, layer.config.hidden_size) for _ in range(2))
    layout = SequenceLayout.parse(case.layout)
    cp_rank = dist.get_rank() // case.tp
    mine = local_indices(lengths or (tokens,), case.cp, cp_rank, layout)
    dtype = getattr(torch, case.dtype)
    x = x[mine].to(device, dtype).requires_grad_()
    out, bias = layer(x, None, packed_seq_params=packed)
    out = out if bias is None else out + bias
    (out * weight[mine].to(device, dtype)).sum().backward()
    found = {"output": digest(out), "input": digest(x.grad)}
    if case.cp == 1 and packed is None and device.type == "cpu":
        found["generated"] = digest(*generated(layer, x))
    return found | {name: digest(p.grad) for name, p in layer.named_parameters()}


@torch.inference_mode()
def generated(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    from megatron.core.inference.contexts import StaticInferenceContext

    tokens, rows, _ = x.shape
    context = StaticInferenceContext(rows, tokens)
    made = []
    for piece in x.split([tokens - 3, 1, 1, 1]):
        made.append(layer.eval()(piece, inference_context=context)[0])
        context.increment_sequence_len_offset(len(piece))
    return made


def run_rank(
    rank: int, world: int, port: int, cases: list[Case], device_type: str
) -> dict[str, dict[str, str]]:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        from megatron_gdn.compat.one_process import run_megatron_on_cpu

        run_megatron_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    splits = {(i,) for i in range(world)} | {tuple(range(world))}
    if world == 4:
        splits |= {(0, 1), (2, 3), (0, 2), (1, 3)}
    groups: dict[tuple, Any] = {}
    for ranks in sorted(splits):
        groups[ranks] = dist.new_group(list(ranks))
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    found = {}
    for case in cases:
        try:
            found[case.name] = run(case, device, groups)
        except Exception as error:
            found[case.name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            if world > 1:  # the other ranks may wait for this one inside a collective
                return found
    dist.barrier()
    dist.destroy_process_group()
    return found


def write(path: Path, device_type: str, ranks: int) -> None:
    cases = list(cpu_cases()) if device_type == "cpu" else list(gpu_cases(ranks))
    results: dict[str, Any] = {}
    for world in sorted({case.tp * case.cp for case in cases}):
        mine = [case for case in cases if case.tp * case.cp == world]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        given = (world, port, mine, device_type)
        of_ranks = in_processes(run_rank, *given, processes=world, timeout=3600)
        for rank, found in enumerate(of_ranks):
            for name, digests in found.items():
                results.setdefault(name, {})[f"rank {rank}"] = digests
        print(f"{len(mine)} cases on {world} rank(s)", flush=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True))


def compare(before: Path, after: Path) -> int:
    a, b = (json.loads(path.read_text()) for path in (before, after))
    differing = [name for name in a if a[name] != b.get(name)]
    errors = [name for name in a if "error" in str(a[name])]
    for name in differing:
        print("differs:", name)
        for rank, digests in a[name].items():
            other = b.get(name, {}).get(rank, {})
            print("   ", rank, *(k for k in digests if digests[k] != other.get(k)))
    for name in errors:
        print("did not run before:", name, a[name]["rank 0"])
    print(f"{len(a)} cases, {len(differing)} differ, {len(errors)} did not run")
    return bool(differing or errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path", type=Path)
    writing.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    writing.add_argument(
        "--ranks", type=int, default=1, help="GPUs; headwise and chunkwise from 2"
    )
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.path, given.device, given.ranks)
    else:
        sys.exit(compare(given.before, given.after))


if __name__ == "__main__":
    main()
