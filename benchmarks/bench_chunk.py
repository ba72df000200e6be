"""The plain-torch chunk rule on a GPU: time, memory, accuracy, and that TF32 does not
reach it.

python3 benchmarks/bench_chunk.py            8192 tokens, 16 key and 32 value heads of
                                             128
python3 benchmarks/bench_chunk.py --profile  and which kernels it spends its time in
"""

from __future__ import annotations

import argparse

import torch
from lib.measure import environment, table, time_ms, write_lines

from megatron_gdn.ops import (
    Documents,
    recurrent_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)

NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")


def inputs(
    tokens: int, G: int, H: int, D: int, decay: float, dtype, same_key: bool = False
):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(
            *shape, generator=generator, device="cuda", dtype=torch.float64
        )

    def unit(x):
        return x / x.norm(dim=-1, keepdim=True)

    q = unit(normal(1, tokens, G, D))
    k = unit(normal(1, tokens, G, D))
    v = normal(1, tokens, H, D)
    if same_key:
        k = k[:, :1].expand_as(k).contiguous()
    g = -decay * torch.nn.functional.softplus(normal(1, tokens, H))
    beta = torch.full_like(g, 0.9) if same_key else normal(1, tokens, H).sigmoid()
    return [x.to(dtype) for x in (q, k, v)] + [x.to(torch.float32) for x in (g, beta)]


def results(rule, tensors, offsets=None, d_o=None):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    o, _ = rule(*leaves, cu_seqlens=offsets)
    if d_o is None:
        d_o = torch.cos(torch.arange(o.numel(), device="cuda").view(o.shape) * 0.7)
    gradients = torch.autograd.grad(o, leaves, d_o.to(o.dtype))
    return dict(zip(NAMES, (o.detach(), *gradients), strict=True))


def errors(actual, expected) -> str:
    return "  ".join(
        f"{name} {((actual[name].double() - x).abs().max() / x.abs().max()).item():.1e}"
        for name, x in expected.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    G, H = args.heads
    rule = torch_chunk_gated_delta_rule
    rows = [["tokens", "documents", "fwd ms", "fwd+bwd ms", "peak MiB"]]
    for tokens in args.tokens:
        tensors = [
            x.requires_grad_() for x in inputs(tokens, G, H, 128, 1.0, torch.bfloat16)
        ]
        grad = torch.randn_like(tensors[2])
        packed = Documents.from_cu_seqlens(
            [0, 100, 163, 164, tokens // 2, tokens], tokens, device="cuda"
        )
        for documents in (None, packed):

            def forward(documents=documents, tensors=tensors):
                return rule(*tensors, cu_seqlens=documents)[0]

            def both(forward=forward, tensors=tensors, grad=grad):
                torch.autograd.grad(forward(), tensors, grad)

            timed = [
                time_ms(run, warmup=3, repeats=10)["median"] for run in (forward, both)
            ]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            count = 1 if documents is None else len(documents.lengths)
            rows.append(
                [str(tokens), str(count), *(f"{t:.2f}" for t in timed), f"{peak:.0f}"]
            )
            record = {
                "bench": "chunk",
                "tokens": tokens,
                "documents": count,
                "forward": timed[0],
                "forward_backward": timed[1],
                "peak": peak,
                "heads": [G, H],
                "environment": environment(),
            }
            write_lines(args.out, [record])
        if args.profile:
            from torch.profiler import ProfilerActivity, profile

            with profile(
                activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
            ) as found:
                both()
                torch.cuda.synchronize()
            print(
                found.key_averages().table(
                    sort_by="self_cuda_time_total",
                    row_limit=25,
                    max_name_column_width=60,
                )
            )
    print(table(rows))

    print(
        "largest error against the fp64 recurrence, of the largest element, 777 tokens:"
    )
    for case, decay, same_key in (
        ("random keys, little decay", 0.01, False),
        ("random keys, decay 8", 8.0, False),
        ("one key, beta 0.9, no decay", 0.0, True),
    ):
        tensors = inputs(777, 2, 4, 128, decay, torch.float32, same_key)
        wide = [x.double() for x in tensors]
        truth = results(recurrent_gated_delta_rule, wide)
        plain = results(rule, tensors)
        print(f"  {case:28} {errors(plain, truth)}")
        torch.set_float32_matmul_precision("high")
        switched = results(rule, tensors)
        torch.set_float32_matmul_precision("highest")
        same = all(torch.equal(plain[name], switched[name]) for name in NAMES)
        print(
            f"  {'':28} with TF32 switched on: "
            f"{'the same bits' if same else 'OTHER BITS'}"
        )

    tensors = inputs(3000, G, H, 128, 1.0, torch.bfloat16)
    d_o = torch.randn_like(tensors[2])
    document = slice(1000, 2500)
    alone = results(rule, [x[:, document] for x in tensors], None, d_o[:, document])
    beside = results(rule, tensors, [0, 63, 1000, 2500, 3000], d_o)
    differ = [
        name
        for name in NAMES
        if not torch.equal(alone[name], beside[name][:, document])
    ]
    print(
        "a document of 1500 tokens alone and beside others: "
        f"{differ or 'the same bits'}"
    )


if __name__ == "__main__":
    main()
