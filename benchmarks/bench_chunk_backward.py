"""The plain rule's backward by autograd, group of chunks by group, beside the one written by hand.

    OMP_NUM_THREADS=1 python3 benchmarks/bench_chunk_backward.py         times and peaks on a CPU
    python3 benchmarks/bench_chunk_backward.py --check                   both against the recurrence
    python3 benchmarks/bench_chunk_backward.py --cases 1x8192-16:32x128  one GPU: the fallback there

Both run forward and backward in turn, in one process. ``lib/chunk_autograd.py`` has the rule.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lib.chunk_autograd import AutogradRule, RuleValues
from torch import Tensor

from megatron_gdn.kda.rule import PlainKDA
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.chunk import ChunkedRule
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.rules.chunk_table import ChunkTable


def inputs_of(B, T, G, H, K, channels: bool, dtype, device, V=None) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rand = partial(torch.randn, dtype=dtype, device=device)
    norm = torch.nn.functional.normalize
    q, k = (norm(rand(B, T, G, K), dim=-1) for _ in "qk")
    shape = (B, T, H, K) if channels else (B, T, H)
    g = -(torch.rand(shape, dtype=torch.promote_types(dtype, torch.float32), device=device) ** 4)
    beta = torch.rand(B, T, H, dtype=g.dtype, device=device)
    return q, k, rand(B, T, H, V or K), g, beta


def both_ways(lengths, inputs, channels: bool) -> dict[str, Callable[[], Any]]:
    """Forward and backward of each rule, as calls that return all results."""
    q, k, v = inputs[:3]
    N, H, K, V = len(lengths), v.shape[2], k.shape[3], v.shape[3]
    wide, scale = torch.promote_types(v.dtype, torch.float32), K**-0.5
    torch.manual_seed(1)
    state, d_final = torch.randn(2, N, H, K, V, dtype=wide, device=v.device)
    do = torch.randn_like(v)
    grouped = (N, k.shape[2], H // k.shape[2], K, V)
    hand = ChunkedRule(lengths, 64, scale, kinds=(PlainKDA if channels else PlainRule).kinds)

    def by_hand():
        s, d = state.view(grouped), d_final.view(grouped)
        o, final = hand.forward(*inputs, s)
        return o, final.flatten(1, 2), *hand.backward(do, d, *inputs, s)

    def by_autograd(keep=False):
        rule = AutogradRule(lengths, 64, scale, keep_graphs=keep)
        o, final, starts = rule.forward(*inputs, state)
        return o, final, *rule.backward(do, d_final, inputs, state, starts)

    graphs = partial(by_autograd, True)
    return {"hand": by_hand, "autograd": by_autograd, "autograd, graphs": graphs}


def check() -> None:
    from megatron_gdn.gdn.api import recurrent_gated_delta_rule
    from megatron_gdn.kda.rule import recurrent_kda
    from megatron_gdn.ops.documents import Documents
    from megatron_gdn.ops.rules import chunk_table

    chunk_table._AT_ONCE = 12  # groups of three chunks of four heads
    for channels in (False, True):
        for lengths in ((130, 64, 1, 200), (1700,)):
            x = inputs_of(1, sum(lengths), 2, 4, 16, channels, torch.float64, "cpu", V=8)
            for kind, g in (("usual", x[3]), ("fast", x[3] * 20), ("still", x[3] * 0)):
                inputs = (*x[:3], g, x[4])
                ways = both_ways(lengths, inputs, channels)
                table = ChunkTable.build(lengths, 64, 4, torch.device("cpu"))
                assert len(table.groups) > 2
                found = {name: run() for name, run in ways.items()}
                torch.manual_seed(1)
                state, d_final = torch.randn(2, len(lengths), 4, 16, 8, dtype=torch.float64)
                do = torch.randn_like(inputs[2])
                leaves = [t.clone().requires_grad_() for t in (*inputs, state)]
                documents = Documents.from_cu_seqlens(
                    [0, *torch.tensor(lengths).cumsum(0).tolist()], sum(lengths), device="cpu"
                )
                if channels:
                    o, final = recurrent_kda(RuleInputs(*leaves[:5]), documents, leaves[5])
                else:
                    o, final = recurrent_gated_delta_rule(
                        *leaves[:5], initial_state=leaves[5], output_final_state=True,
                        cu_seqlens=documents,
                    )  # fmt: skip
                grads = torch.autograd.grad((o, final), leaves, (do, d_final))
                exact = (o.detach(), final.detach(), *grads)
                worst = {}
                for name, made in found.items():
                    off = [
                        float((a.view(b.shape) - b).abs().max() / b.abs().max().clamp(min=1e-300))
                        for a, b in zip(made, exact, strict=True)
                    ]
                    worst[name] = max(off)
                    assert name == "hand" or max(off) < 1e-11, (channels, lengths, kind, off)
                print("channel" if channels else "head", lengths, kind,
                      {n: f"{w:.1e}" for n, w in worst.items()}, flush=True)  # fmt: skip


def check_own_erase_key() -> None:
    """Gated DeltaNet-2: e = b k and u = w v, with gates of their own per channel."""
    from megatron_gdn.ops.rules import chunk_table

    chunk_table._AT_ONCE = 12
    lengths, H, K, V = (130, 64, 1, 200), 4, 16, 8
    q, k, v, g, _ = inputs_of(1, sum(lengths), H, H, K, True, torch.float64, "cpu", V=V)
    b, w = torch.rand_like(g), torch.rand_like(v)
    state, d_final = torch.randn(2, len(lengths), H, K, V, dtype=torch.float64)
    do, inputs = torch.randn_like(v), (q, k, v, g, b, w)
    values = lambda q, k, v, g, b, w: RuleValues(q, k, b * k, None, w * v, g)  # noqa: E731
    rule = AutogradRule(lengths, 64, K**-0.5, values)
    o, final, starts = rule.forward(*inputs, state)
    found = (o, final, *rule.backward(do, d_final, inputs, state, starts))
    leaves = [t.clone().requires_grad_() for t in (*inputs, state)]
    q, k, v, g, b, w = (t[0] for t in leaves[:6])
    outputs, states, t = [], [], 0
    for n, length in enumerate(lengths):
        S = leaves[6][n]
        for _ in range(length):
            S = g[t].exp()[..., None] * S
            S = (
                S
                + k[t][..., None] * (w[t] * v[t] - ((b[t] * k[t])[..., None] * S).sum(-2))[:, None]
            )
            outputs.append((q[t][..., None] * S).sum(-2) * K**-0.5)
            t += 1
        states.append(S)
    made = torch.stack(outputs)[None], torch.stack(states)
    exact = (*(x.detach() for x in made), *torch.autograd.grad(made, leaves, (do, d_final)))
    off = [float((a - x).abs().max() / x.abs().max()) for a, x in zip(found, exact, strict=True)]
    assert max(off) < 1e-11, off
    print(f"an erase key of its own, {lengths}: {max(off):.1e}")


CASES = {
    # rows, tokens, key heads, value heads, head dim
    "demo-8x256-2:4x32": (8, 256, 2, 4, 32),  # the defaults of examples/pretraining
    "1x4096-4:8x64": (1, 4096, 4, 8, 64),
    "1x4096-16:32x128": (1, 4096, 16, 32, 128),
    "1x8192-16:32x128": (1, 8192, 16, 32, 128),
}


def peak_mib(run: Callable[[], object]) -> float:
    """Memory that a call holds at most, beyond what was held before.

    On a CPU of resident pages: MALLOC_MMAP_THRESHOLD_=65536 has freed ones given back at once.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES)[:3])
    parser.add_argument("--channels", action="store_true", help="a decay per channel")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    if args.check:
        check()
        check_own_erase_key()
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    for name in args.cases:
        B, T, G, H, K = CASES[name]
        inputs = inputs_of(B, T, G, H, K, args.channels, getattr(torch, args.dtype), device)
        ways, times, peaks = both_ways((T,) * B, inputs, args.channels), {}, {}
        for way, run in ways.items():
            run()
            peaks[way], times[way] = peak_mib(run), []
        began = time.monotonic()
        rounds = args.rounds if T * H >= 65536 else args.rounds * 20
        for _ in range(rounds):
            for way, run in ways.items():
                before = clock()
                run()
                times[way].append((clock() - before) * 1e3)
            if time.monotonic() - began > args.seconds:
                break
        base = times["hand"]
        for way, of_way in times.items():
            ratio = [a / b for a, b in zip(of_way, base, strict=True)]
            kind = "channel" if args.channels else "head"
            print(f"{name} {kind} {way}: least {min(of_way):.1f} ms "
                  f"(x{min(of_way) / min(base):.3f}), median {statistics.median(of_way):.1f} "
                  f"(x{statistics.median(of_way) / statistics.median(base):.3f}; by round "
                  f"{min(ratio):.2f} to {max(ratio):.2f}), peak {peaks[way]:.0f} MiB, "
                  f"{len(of_way)} rounds", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
