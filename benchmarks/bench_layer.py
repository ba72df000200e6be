"""Our layer beside megatron-core's own, in one run: time, memory, and the floor under
both.

    python3 benchmarks/bench_layer.py --out results.jsonl         every case, FlashQLA
    python3 benchmarks/bench_layer.py --core fla --cases 1x32768  fla's Triton kernels
                                                                  in both
    python3 benchmarks/bench_layer.py --layers ours ours-bf16     what bf16 operands
                                                                  would save

Every measurement is one JSON line. The floor is: both projections alone + the delta
rule alone + the bytes that must move around them at the copy bandwidth of this GPU.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from lib.floor import floor_ms
from lib.layers import (
    CASES,
    GATES,
    LINEARS,
    OPTIONS,
    forwards,
    start_megatron,
    with_backward,
)
from lib.measure import (
    copy_bandwidth,
    environment,
    memory_mib,
    table,
    time_ms,
    write_lines,
)

from megatron_gdn.ops.delta_rule.base import HeadSizes

IMPLEMENTATIONS = ("upstream", "ours", "ours-recompute")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES)[:4])
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=("upstream", *OPTIONS),
        default=list(IMPLEMENTATIONS),
    )
    parser.add_argument("--core", choices=("flash_qla", "fla"), default="flash_qla")
    parser.add_argument(
        "--linears",
        choices=LINEARS,
        default="local",
        help="te: Transformer Engine's, which add gradients into main_grad",
    )
    parser.add_argument(
        "--gates",
        choices=GATES,
        default="fast",
        help="fast: as initialised; slow: a state lives over some 4,096 tokens",
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="append JSON lines to this file")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new case after this"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="one forward+backward each"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    began = time.monotonic()
    # Both layers run the same delta rule: fla hands it to FlashQLA unless told not to.
    os.environ["FLA_FLASH_QLA"] = "1" if args.core == "flash_qla" else "0"
    start_megatron()
    sizes = HeadSizes(*args.heads, 128, 128)
    bandwidth = 0.0 if args.compile_only else copy_bandwidth()
    setting = {
        "environment": environment(),
        "core": args.core,
        "hidden": args.hidden,
        "heads": list(args.heads),
        "copy_TB_s": bandwidth / 1e12,
        "linears": args.linears,
        "gates": args.gates,
    }
    rows = [
        [
            "case",
            "layer",
            "fwd ms",
            "fwd+bwd ms",
            "ratio",
            "ratio",
            "saved MiB",
            "ratio",
            "peak MiB",
        ]
    ]
    for name in args.cases:
        if time.monotonic() - began > args.seconds:
            print(f"{name}: skipped, out of time", flush=True)
            continue
        case = CASES[name]
        runs, modules, x, documents = forwards(case, args.layers, args, sizes)
        if args.compile_only:
            for layer, run in runs.items():
                with_backward(run, modules[layer], x)()
            torch.cuda.synchronize()
            continue
        base = None
        for layer, run in runs.items():
            both = with_backward(run, modules[layer], x)
            forward = time_ms(run, repeats=args.repeats)
            total = time_ms(both, repeats=args.repeats)
            x.grad = None
            memory = memory_mib(run)
            record = {
                "case": name,
                "layer": layer,
                "forward": forward,
                "forward_backward": total,
                **memory,
                **setting,
            }
            write_lines(args.out, [record])
            here = (forward["median"], total["median"], memory["saved"])
            base = here if base is None else base
            ratios = [f"{a / b:.3f}" for a, b in zip(here, base, strict=True)]
            rows.append(
                [
                    name,
                    layer,
                    f"{here[0]:.3f}",
                    f"{here[1]:.3f}",
                    *ratios[:2],
                    f"{here[2]:.0f}",
                    ratios[2],
                    f"{memory['peak']:.0f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
        ours = next((m for layer, m in modules.items() if layer != "upstream"), None)
        if ours is not None:
            floor = floor_ms(
                case,
                ours,
                sizes,
                x,
                documents,
                bandwidth,
                lambda run: time_ms(run, repeats=args.repeats)["median"],
            )
            write_lines(args.out, [{"case": name, "floor": floor, **setting}])
            total = floor["total"]
            rows.append(
                [
                    name,
                    "floor",
                    f"{total[0]:.3f}",
                    f"{total[1]:.3f}",
                    *(f"{t / b:.3f}" for t, b in zip(total, base, strict=False)),
                    "",
                    "",
                    "",
                ]
            )
            parts = [f"{part} {a:.3f} / {b:.3f}" for part, (a, b) in floor.items()]
            print(f"{name} floor: {'; '.join(parts)}", flush=True)
        del runs, modules, ours, x
        torch.cuda.empty_cache()
    if not args.compile_only:
        print(
            f"\ncore {args.core}, copy {bandwidth / 1e12:.2f} TB/s; ratios to the "
            "first layer"
        )
        print(table(rows))


if __name__ == "__main__":
    main()
