"""Our Mamba2 mixer: forward and backward beside its floor, and its error against fp64,
in one run.

    python3 benchmarks/bench_mamba2.py --out results.jsonl   1 x 8192 and packed, on a
                                                             GPU
    python3 benchmarks/bench_mamba2.py --tiny               a few tokens, on any machine

The floor is: both projections alone + the recurrence alone + the bytes that must move
around them at the copy bandwidth of this GPU. The error is that of the output and the
input gradient of a mixer with the same heads, but a narrow hidden size and few tokens,
against the plain rule on the same weights in fp64, beside the error of the same mixer
with the plain-torch rule in bf16. Every case's times are printed before its error is
computed, with the seconds since the start.

Legend: S seq, B batch, D hidden, H heads, G groups, V head dim, K state dim.
"""

from __future__ import annotations

import argparse
import time

import torch
from lib.layers import DEVICE, Case, start_megatron, thd
from lib.measure import copy_bandwidth, environment, table, time_of, write_lines
from torch import nn

from megatron_gdn import Mamba2Mixer, Mamba2MixerSubmodules
from megatron_gdn.mamba2.rule import SSDInputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.rules.base import Saved

CASES = {
    case.name: case
    for case in (Case("1x8192", 1, 8192), Case("thd8192", 1, 8192, documents=16))
}
TINY = {
    case.name: case
    for case in (Case("2x96", 2, 96), Case("thd160", 1, 160, documents=3))
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--state-dim", type=int, default=128)
    parser.add_argument(
        "--backend", choices=("auto", "fla", "reference"), default="auto"
    )
    parser.add_argument("--checked-tokens", type=int, default=256, help="held to fp64")
    parser.add_argument("--checked-hidden", type=int, default=256, help="likewise")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new case after this"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and 2 repeats")
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    if args.tiny:
        args.hidden = 32
        args.heads = 4
        args.groups = 2
        args.head_dim = 16
        args.state_dim = 16
        args.repeats = 2
    return args


def build(args: argparse.Namespace, dtype: torch.dtype, backend: str) -> Mamba2Mixer:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=4,
        normalization="RMSNorm",
        mamba_num_heads=args.heads,
        mamba_num_groups=args.groups,
        mamba_head_dim=args.head_dim,
        mamba_state_dim=args.state_dim,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=DEVICE == "cpu",
    )
    linears = Mamba2MixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
    )
    mixer = Mamba2Mixer(
        config,
        linears,
        args.hidden,
        backend=backend,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
    )
    return mixer.to(DEVICE)


def with_backward(run, module: nn.Module, x: torch.Tensor):
    grad = torch.randn_like(run())

    def both() -> None:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        run().backward(grad)

    return both


def errors(args: argparse.Namespace, case: Case) -> dict[str, float]:
    """Root mean square against fp64, relative: of the backend, and of the plain rule in
    bf16."""
    args = argparse.Namespace(**vars(args) | {"hidden": args.checked_hidden})
    mixer = build(args, torch.bfloat16, args.backend)
    tokens = min(case.tokens, args.checked_tokens)
    checked = Case(case.name, case.batch, tokens, case.documents)
    x = torch.randn(
        tokens, case.batch, args.hidden, device=DEVICE, dtype=torch.bfloat16
    )
    weight = torch.randn_like(x)
    exact = build(args, torch.float64, "reference")
    plain = build(args, torch.bfloat16, "reference")
    plain.load_state_dict(mixer.state_dict())
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            exact.get_parameter(name).data = parameter.detach().double()

    def run(module: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = x.detach().to(dtype).requires_grad_()
        y, _ = module(leaf, packed_seq_params=thd(checked.offsets()))
        y.backward(weight.to(dtype))
        return [y.detach().double(), leaf.grad.double()]

    truth = run(exact, torch.float64)
    found = {}
    for who, module in (("ours", mixer), ("plain", plain)):
        for what, got, true in zip(
            ("y", "dx"), run(module, torch.bfloat16), truth, strict=True
        ):
            rms = (got - true).square().mean().sqrt() / true.square().mean().sqrt()
            found[f"{who} {what}"] = float(rms)
    return found


def floor_ms(
    args, case: Case, mixer: Mamba2Mixer, x: torch.Tensor, bandwidth: float
) -> dict:
    """Projections alone, recurrence alone, and minimum bytes of the rest: forward,
    both."""
    H = args.heads
    G = args.groups
    V = args.head_dim
    K = args.state_dim
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    mixed = torch.randn(case.tokens, case.batch, H * V, **kind, requires_grad=True)
    pairs = ((mixer.in_proj, x), (mixer.out_proj, mixed))
    with torch.no_grad():
        grads = [torch.randn_like(f(t)[0]) for f, t in pairs]

    def projections(backward: bool) -> None:
        for (f, t), grad in zip(pairs, grads, strict=True):
            t.grad = f.weight.grad = None
            out = f(t)[0]
            if backward:
                out.backward(grad)

    shape = (case.batch, case.tokens)
    dt = torch.rand(*shape, H, device=DEVICE) * 0.1
    inputs = SSDInputs(
        torch.randn(*shape, H, V, **kind),
        torch.randn(*shape, G, K, **kind),
        torch.randn(*shape, G, K, **kind),
        dt,
        -dt * torch.rand(H, device=DEVICE) * 16,
        torch.ones(H, 1, device=DEVICE).expand(*shape, H, 1),
    )
    d_o = torch.randn_like(inputs.x)
    offsets = case.offsets()
    documents = None
    if offsets is not None:
        documents = Documents.from_cu_seqlens(offsets, case.tokens, device=DEVICE)

    def rule(backward: bool) -> None:
        saved: Saved = mixer.rule.begin(inputs, documents).run().saved
        if backward:
            mixer.rule.begin_backward(d_o, inputs, saved, documents).run()

    channels = mixer.layout.conv_width
    per_token_fwd = 2 * 2 * channels + 3 * 2 * H * V + 12 * H
    per_token_bwd = 2 * 3 * channels + 5 * 2 * H * V + 16 * H
    tokens = case.tokens * case.batch
    gemm = [time_of(lambda b=b: projections(b), args.repeats)["median"] for b in (0, 1)]
    core = [time_of(lambda b=b: rule(b), args.repeats)["median"] for b in (0, 1)]
    move = [tokens * per_token_fwd / bandwidth * 1e3]
    move.append(move[0] + tokens * per_token_bwd / bandwidth * 1e3)
    total = [g + c + m for g, c, m in zip(gemm, core, move, strict=True)]
    return {"projections": gemm, "rule": core, "bytes": move, "total": total}


def main() -> None:
    args = arguments()
    began = time.monotonic()
    start_megatron()
    torch.manual_seed(0)
    on_gpu = DEVICE == "cuda"
    bandwidth = copy_bandwidth() if on_gpu else 1e10
    setting = {
        "environment": environment() if on_gpu else {"gpu": "none"},
        "sizes": [args.hidden, args.heads, args.groups, args.head_dim, args.state_dim],
        "copy_TB_s": bandwidth / 1e12 if on_gpu else None,
    }
    mixer = build(args, torch.bfloat16, args.backend)
    rows = [
        [
            "case",
            "backend",
            "fwd ms",
            "fwd+bwd ms",
            "floor",
            "ratio",
            "y",
            "dx",
            "plain y, dx",
        ]
    ]
    for name, case in (
        TINY if args.tiny else {name: CASES[name] for name in args.cases}
    ).items():
        if time.monotonic() - began > args.seconds:
            print(f"{name}: skipped, out of time", flush=True)
            continue
        x = torch.randn(
            case.tokens, case.batch, args.hidden, device=DEVICE, dtype=torch.bfloat16
        )
        x.requires_grad_()
        packed = thd(case.offsets())

        def run(x=x, packed=packed) -> torch.Tensor:
            return mixer(x, packed_seq_params=packed)[0]

        forward = time_of(run, args.repeats)
        both = time_of(with_backward(run, mixer, x), args.repeats)
        floor = floor_ms(args, case, mixer, x, bandwidth)
        least = floor["total"][1]
        row = [
            name,
            mixer.backend,
            f"{forward['median']:.3f}",
            f"{both['median']:.3f}",
            f"{least:.3f}",
            f"{both['median'] / least:.2f}",
        ]
        parts = [f"{part} {a:.3f} / {b:.3f}" for part, (a, b) in floor.items()]
        print(f"{'  '.join(row)}\n{name} floor: {'; '.join(parts)}", flush=True)
        print(f"timed after {time.monotonic() - began:.0f} s", flush=True)
        error = errors(args, case)
        print(f"checked after {time.monotonic() - began:.0f} s", flush=True)
        record = {
            "case": name,
            "backend": mixer.backend,
            "forward": forward,
            "forward_backward": both,
            "floor": floor,
            "errors": error,
            **setting,
        }
        write_lines(args.out, [record])
        rows.append(
            [
                *row,
                f"{error['ours y']:.1e}",
                f"{error['ours dx']:.1e}",
                f"{error['plain y']:.1e}, {error['plain dx']:.1e}",
            ]
        )
    print(table(rows))


if __name__ == "__main__":
    main()
