"""The layer under context parallelism: megatron-core's, ours in both schemes, and the
bare wire.

    torchrun --nproc-per-node 4 benchmarks/bench_context_parallel.py --out results.jsonl

Every rank is a context-parallel rank. All layers hold the same weights and read the
same tokens; ``off`` is how far a layer's output lies from megatron-core's, as a share
of its size (both are bf16). ``wire`` is the head exchange's bytes through bare
``all_to_all_single`` calls.

Legend: s this rank's tokens, P projection width, V value width.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from lib.layers import (
    DEVICE,
    our_layer,
    row_of,
    thd,
    through,
    transformer_config,
    upstream_layer,
)
from lib.measure import (
    IN_A_ROW,
    captured,
    environment,
    host_ms,
    memory_mib,
    slowest,
    table,
    time_ms,
    write_lines,
)
from profile_layer import kernel_times, print_kernels

from megatron_gdn import GDNDims, SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.ops.delta_rule.base import HeadSizes

LAYERS = ("upstream", "headwise", "chunkwise", "auto")


@dataclass(frozen=True)
class Case:
    """``tokens`` over all ranks; ``document`` > 0 packs documents of that many
    tokens, or with ``mixed`` of log-normal lengths with this median."""

    name: str
    tokens: int
    document: int = 0
    mixed: bool = False

    def shrunk(self, by: int) -> Case:
        return replace(self, tokens=self.tokens // by, document=self.document // by)

    def lengths(self, cp: int) -> list[int]:
        """The documents' lengths, multiples of 2 * ``cp`` as zigzag needs them."""
        if not self.document:
            return [self.tokens]
        if not self.mixed:
            return [self.document] * (self.tokens // self.document)
        drawn = random.Random(3)
        lengths = []
        left = self.tokens
        while left:
            length = round(self.document * drawn.lognormvariate(0, 1))
            length = min(left, max(1, length // (2 * cp)) * 2 * cp)
            lengths.append(length)
            left -= length
        return lengths


CASES = {
    case.name: case
    for case in (
        Case("131072", 131072),
        Case("32768", 32768),
        Case("16384", 16384),
        Case("thd32768", 32768, document=4096),
        Case("thd32768x512", 32768, document=512),
        Case("thd131072", 131072, document=4096),
        Case("thd131072x512", 131072, document=512),
        Case("thd131072mixed", 131072, document=2048, mixed=True),
    )
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=["131072", "32768", "thd32768", "thd32768x512"],
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument(
        "--layout",
        choices=[str(layout) for layout in SequenceLayout],
        default="zigzag",
        help="how sequences are cut over ranks; megatron-core's layer knows zigzag",
    )
    parser.add_argument(
        "--core", choices=("flash_qla", "fla", "reference"), default="flash_qla"
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide every length by this"
    )
    parser.add_argument("--out", help="append JSON lines to this file")
    parser.add_argument(
        "--graphs", action="store_true", help="also as CUDA graphs (not packed)"
    )
    parser.add_argument(
        "--in-a-row",
        type=int,
        default=1,
        choices=IN_A_ROW,
        metavar="LAYERS",
        help=(
            "1 to 6 layers after each other, as in a model; only the host's times "
            "are of one"
        ),
    )
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="show the N longest"
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="one forward+backward each; also on a CPU",
    )
    return parser.parse_args()


def wire_ms(case: Case, dims: GDNDims, repeats: int) -> tuple[dict, dict]:
    """Both exchanges of a forward, and of a forward and backward, with nothing around
    them."""
    cp = dist.get_world_size()
    s = case.tokens // cp
    blocks = [
        torch.randn(cp, s, width // cp, device=DEVICE).bfloat16()
        for width in (dims.layout.width, dims.v_dim)
    ]
    received = [torch.empty_like(x) for x in blocks]

    def exchange(times: int) -> None:
        for _ in range(times):
            for source, target in zip(blocks, received, strict=True):
                dist.all_to_all_single(target, source)

    return tuple(
        slowest(time_ms(lambda n=n: exchange(n), repeats=repeats)) for n in (1, 2)
    )


def build(name: str, args, sizes: HeadSizes):
    if name == "upstream":
        return upstream_layer(args.hidden, sizes, cp=dist.get_world_size())
    return our_layer(
        args.hidden,
        sizes,
        args.core,
        cp=dist.get_world_size(),
        linear_cp_mode=name,
        cp_layout=args.layout,
    )


def main() -> None:
    args = arguments()
    # how torchrun ends a rank: says where it is
    faulthandler.register(signal.SIGTERM, chain=True)
    os.environ["FLA_FLASH_QLA"] = "1" if args.core == "flash_qla" else "0"
    rank = int(os.environ["RANK"])
    cp = int(os.environ["WORLD_SIZE"])
    from megatron.core import parallel_state, tensor_parallel

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "nccl", device_id=torch.device("cuda", torch.cuda.current_device())
        )
    else:
        from megatron_gdn.compat.one_process import run_megatron_on_cpu

        run_megatron_on_cpu()
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    sizes = HeadSizes(*args.heads, 128, 128)
    dims = GDNDims.from_config(transformer_config(args.hidden, sizes))
    setting = {
        "environment": {} if args.compile_only else environment(),
        "core": args.core,
        "hidden": args.hidden,
        "heads": list(args.heads),
        "cp": cp,
        "in_a_row": args.in_a_row,
        "layout": args.layout,
    }
    rows = [
        ["case", "layer", "fwd ms", "fwd+bwd ms", "ratio", "ratio", "saved MiB", "off"]
    ]
    hosts = [["case", "layer", "host ms, fwd+bwd", "ratio", "in one thread", "ratio"]]
    began = time.monotonic()
    for name in args.cases:
        case = CASES[name].shrunk(args.shrink)
        torch.manual_seed(1)
        whole = torch.randn(case.tokens, 1, args.hidden, dtype=torch.bfloat16)
        lengths = case.lengths(cp)
        offsets = None
        if case.document:
            offsets = [0, *accumulate(lengths)]
        mine = local_indices(lengths, cp, rank, SequenceLayout(args.layout))
        x = whole[mine].to(DEVICE).requires_grad_()
        grad = torch.randn_like(x)
        base = None
        truth = None
        state = None
        whole_steps = {}
        for name in args.layers:
            torch.manual_seed(2)
            layer = row_of(partial(build, name, args, sizes), args.in_a_row)
            params = thd(offsets)
            if state is None:
                state = layer.state_dict()
            layer.load_state_dict(state)

            def run(layer=layer, params=params, x=x):
                return through(layer, x, params)

            def both(run=run, layer=layer, x=x, grad=grad) -> None:
                x.grad = None
                for parameter in layer.parameters():
                    parameter.grad = None
                run().backward(grad)

            if args.compile_only:
                both()
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                continue
            out = run().detach().float()
            truth = out if truth is None else truth
            off = ((out - truth).norm() / truth.norm()).item()
            forward = slowest(time_ms(run, repeats=args.repeats))
            total = slowest(time_ms(both, repeats=args.repeats))
            whole_steps[name] = both
            x.grad = None
            memory = memory_mib(run)
            here = (forward["median"], total["median"])
            base = here if base is None else base
            rows.append(
                [
                    case.name,
                    name,
                    *(f"{t:.3f}" for t in here),
                    *(f"{a / b:.3f}" for a, b in zip(here, base, strict=True)),
                    f"{memory['saved']:.0f}",
                    f"{off:.1e}",
                ]
            )
            if rank == 0:
                print(
                    "  ".join(rows[-1]),
                    f"at {time.monotonic() - began:.0f} s",
                    flush=True,
                )
                record = {
                    "case": case.name,
                    "layer": name,
                    "forward": forward,
                    "forward_backward": total,
                    "off": off,
                    **memory,
                    **setting,
                }
                write_lines(args.out, [record])
            if args.graphs and not case.document:  # documents cannot be captured
                replays = [
                    slowest(time_ms(captured(f)[0].replay, repeats=args.repeats))
                    for f in (run, both)
                ]
                graphed = tuple(times["median"] for times in replays)
                rows.append(
                    [
                        case.name,
                        f"{name}, graph",
                        *(f"{t:.3f}" for t in graphed),
                        *(f"{a / b:.3f}" for a, b in zip(graphed, base, strict=True)),
                        "",
                        "",
                    ]
                )
                if rank == 0:
                    print("  ".join(rows[-1]), flush=True)
                    record = {
                        "case": case.name,
                        "layer": f"{name}, graph",
                        "forward": replays[0],
                        "forward_backward": replays[1],
                        **setting,
                    }
                    write_lines(args.out, [record])
            if args.kernels:
                times = kernel_times(both)
                if rank == 0:
                    print_kernels(f"{case.name} {name}", times, args.kernels)
            del layer, out
            torch.cuda.empty_cache()
        if args.compile_only:
            continue
        steps = list(whole_steps.values())
        several = args.in_a_row
        issued = [slowest(found) for found in host_ms(steps, in_a_row=several)]
        with torch.autograd.set_multithreading_enabled(False):
            alone = [slowest(found) for found in host_ms(steps, in_a_row=several)]
        for name, host, one in zip(whole_steps, issued, alone, strict=True):
            hosts.append(
                [
                    case.name,
                    name,
                    f"{host['median']:.3f} ({host['p10']:.3f} .. {host['p90']:.3f})",
                    f"{host['median'] / issued[0]['median']:.3f}",
                    f"{one['median']:.3f}",
                    f"{one['median'] / alone[0]['median']:.3f}",
                ]
            )
            if rank == 0:
                record = {
                    "case": case.name,
                    "layer": name,
                    "host_forward_backward": host,
                    "host_in_one_thread": one,
                    **setting,
                }
                write_lines(args.out, [record])
        del whole_steps, steps, both, run
        torch.cuda.empty_cache()
        forward, total = wire_ms(case, dims, args.repeats)
        here = (forward["median"], total["median"])
        ratios = [f"{a / b:.3f}" for a, b in zip(here, base, strict=True)]
        rows.append([case.name, "wire", *(f"{t:.3f}" for t in here), *ratios, "", ""])
        if rank == 0:
            write_lines(
                args.out,
                [
                    {
                        "case": case.name,
                        "layer": "wire",
                        "forward": forward,
                        "forward_backward": total,
                        **setting,
                    }
                ],
            )
    if rank == 0 and not args.compile_only:
        print(
            f"\n{cp} ranks, core {args.core}; ratios to the first layer\n{table(rows)}"
        )
        print(f"\n{table(hosts)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
