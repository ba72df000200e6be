"""A layer's forward and backward launched by Python and replayed as a CUDA graph, on
one GPU.

    python3 benchmarks/bench_graphs.py --out results.jsonl

Packed, ours is captured with room for ``--max-documents`` and replayed with the case's
documents; megatron-core's layer reads its boundaries on the host and cannot be
captured. Before it is timed, every replay is compared with the eager step: ``same``
counts the tensors that have the same bits.
"""

from __future__ import annotations

import argparse
import os

import torch
from lib.layers import (
    Case,
    our_layer,
    start_megatron,
    thd,
    upstream_layer,
    with_backward,
)
from lib.measure import captured, environment, table, time_ms, write_lines

from megatron_gdn import set_documents, static_packed_seq_params
from megatron_gdn.ops.delta_rule.base import HeadSizes

CASES = {
    case.name: case
    for case in (
        Case("1x8192", 1, 8192),
        Case("thd8192", 1, 8192, documents=8),
        Case("1x32768", 1, 32768),
        Case("thd32768", 1, 32768, documents=32),
    )
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--layers", nargs="+", choices=("upstream", "ours"), default=["ours"]
    )
    parser.add_argument("--core", choices=("flash_qla", "fla"), default="flash_qla")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--max-documents", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def results(x: torch.Tensor, module: torch.nn.Module) -> list[torch.Tensor]:
    return [x.grad.clone(), *(p.grad.clone() for p in module.parameters())]


def main() -> None:
    args = arguments()
    # Both layers run the same delta rule: fla hands it to FlashQLA unless told not to.
    os.environ["FLA_FLASH_QLA"] = "1" if args.core == "flash_qla" else "0"
    start_megatron()
    sizes = HeadSizes(*args.heads, 128, 128)
    setting = {
        "environment": environment(),
        "core": args.core,
        "hidden": args.hidden,
        "heads": list(args.heads),
        "max_documents": args.max_documents,
    }
    rows = [["case", "layer", "eager ms", "host ms", "graph ms", "same"]]
    for case in (CASES[name] for name in args.cases):
        torch.manual_seed(1)
        x = torch.randn(case.tokens, case.batch, args.hidden, device="cuda").bfloat16()
        x.requires_grad_()
        offsets = case.offsets()
        for name in args.layers:
            ours = name == "ours"
            torch.manual_seed(2)
            if ours:
                module = our_layer(args.hidden, sizes, args.core)
            else:
                module = upstream_layer(args.hidden, sizes)
            packed = thd(offsets)
            both = with_backward(
                lambda m=module, p=packed, x=x: m(x, None, packed_seq_params=p)[0],
                module,
                x,
            )
            eager = time_ms(both, repeats=args.repeats)
            record = {"case": case.name, "layer": name, "eager": eager, **setting}
            row = [
                case.name,
                name,
                f"{eager['median']:.3f}",
                f"{eager['host']:.3f}",
                "",
                "",
            ]
            if ours or offsets is None:
                if offsets is not None:
                    packed = static_packed_seq_params(case.tokens, args.max_documents)
                    set_documents(packed, offsets)
                    both = with_backward(
                        lambda m=module, p=packed, x=x: m(x, None, packed_seq_params=p)[
                            0
                        ],
                        module,
                        x,
                    )
                both()
                expected = results(x, module)
                graph, _ = captured(both)
                captured_at = x.grad  # where replays write
                graph.replay()
                found = [captured_at, *(p.grad for p in module.parameters())]
                same = sum(map(torch.equal, found, expected))
                times = time_ms(graph.replay, repeats=args.repeats)
                record |= {"graph": times, "same": same, "tensors": len(expected)}
                row[-2:] = [f"{times['median']:.3f}", f"{same} of {len(expected)}"]
            write_lines(args.out, [record])
            rows.append(row)
            print("  ".join(row), flush=True)
            del module, both
            torch.cuda.empty_cache()
    print(f"\ncore {args.core}, forward and backward\n{table(rows)}")


if __name__ == "__main__":
    main()
