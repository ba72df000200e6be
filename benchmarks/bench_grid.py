"""What one grid for training and generation costs, and a forward that no backward
follows.

    python3 benchmarks/bench_grid.py --out grid.jsonl  # a GPU: Qwen3-Next's layer in
                                                       # bf16
    python3 benchmarks/bench_grid.py --mixer mamba2    # likewise a Mamba2 mixer
    python3 benchmarks/bench_grid.py --small           # anywhere, fp32 on a CPU

Three parts. "train": forward and backward in deterministic mode and in batch-invariant
mode, of one sequence and of packed documents. "forward": the same layer under
``torch.no_grad``, its time and its memory against forward and backward. "decode": a
step of one token for each request, ordinary and in batch-invariant mode, in Megatron's
StaticInferenceContext, eager.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench_decode import SIZES, build_layer  # noqa: E402
from benchmarks.lib.measure import time_ms  # noqa: E402

SMALL = {
    "gdn": {
        "hidden_size": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    },
    "mamba2": {
        "hidden_size": 256,
        "mamba_num_heads": 8,
        "mamba_num_groups": 2,
        "mamba_head_dim": 32,
        "mamba_state_dim": 32,
    },
}
ON_GPU = torch.cuda.is_available()
PLACE = "cuda" if ON_GPU else "cpu"
MODES = ("deterministic_mode", "batch_invariant_mode")


def in_a_queue(run: Callable[[], object], repeats: int) -> float:
    """The median of calls whose launches queue up behind each other, as those of
    training do."""
    return (
        time_ms(run, repeats=repeats)["median"]
        if ON_GPU
        else milliseconds(run, repeats)
    )


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median of single calls, each begun when the one before has ended, as in
    decoding."""
    times = []
    for _ in range(repeats + 2):
        if ON_GPU:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if ON_GPU:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def peak_mib(run: Callable[[], object]) -> float | None:
    """Bytes that a call holds at most, beyond what was held before; None without a
    GPU."""
    if not ON_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def packed(lengths: list[int]):
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor([0, *lengths], device=PLACE).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def switch(layer, mode: str) -> None:
    """One mode on, the others off."""
    for name in MODES:
        setattr(layer.config, name, name == mode)


def train(layer, tokens: int, repeats: int, emit) -> None:
    hidden = layer.config.hidden_size
    weight = layer.conv_parameters[0]
    x = torch.randn(
        tokens, 1, hidden, dtype=weight.dtype, device=PLACE, requires_grad=True
    )
    d_out = torch.randn_like(x)
    documents = packed(
        [tokens // 8 + 37, tokens // 2, 63, tokens - tokens // 8 - tokens // 2 - 100]
    )
    layer.train()
    for layout, boundaries in (("one sequence", None), ("packed", documents)):
        base = None
        for mode in MODES:
            switch(layer, mode)

            def forward(boundaries=boundaries):
                return layer(x, None, packed_seq_params=boundaries)[0]

            def both(forward=forward):
                x.grad = None
                for parameter in layer.parameters():
                    parameter.grad = None
                forward().backward(d_out)

            both()
            total = in_a_queue(both, repeats)
            with torch.no_grad():
                forward()
                alone = in_a_queue(forward, repeats)
                held = peak_mib(forward)
            base = base or total
            emit(
                part="train",
                layout=layout,
                mode=mode,
                backend=layer.backend,
                tokens=tokens,
                forward_backward_ms=total,
                forward_alone_ms=alone,
                forward_alone_peak_mib=held,
                forward_backward_peak_mib=peak_mib(both),
                to_deterministic=total / base,
            )


@torch.inference_mode()
def decode(layer, batch: int, context: int, repeats: int, emit) -> None:
    from megatron.core.inference.contexts import StaticInferenceContext

    hidden = layer.config.hidden_size
    weight = layer.conv_parameters[0]
    layer.eval()
    base = None
    for mode in MODES:
        switch(layer, mode)
        x = torch.randn(context, batch, hidden, dtype=weight.dtype, device=PLACE)
        memory = StaticInferenceContext(batch, context + repeats + 2)

        def feed(x, memory=memory):
            layer(x, inference_context=memory)
            memory.increment_sequence_len_offset(len(x))

        feed(x)
        step = milliseconds(lambda feed=feed, x=x: feed(x[:1]), repeats)
        base = base or step
        emit(
            part="decode",
            batch=batch,
            mode=mode,
            backend=layer.backend,
            step_ms=step,
            to_ordinary=step / base,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append lines to")
    parser.add_argument("--mixer", choices=tuple(SIZES), default="gdn")
    parser.add_argument("--small", action="store_true", help="a small layer")
    parser.add_argument("--parts", nargs="+", default=["train", "decode"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=8192 if ON_GPU else 1024)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 32, 256] if ON_GPU else [1, 4]
    )
    parser.add_argument("--repeats", type=int, default=20 if ON_GPU else 5)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new case after this"
    )
    args = parser.parse_args()
    began = time.monotonic()
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    sizes = (SMALL if args.small else SIZES)[args.mixer]
    layer = build_layer(args.mixer, sizes, dtype, PLACE, args.backend)
    common = {
        "mixer": args.mixer,
        "hidden": sizes["hidden_size"],
        "dtype": str(dtype),
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
    }

    def emit(**line) -> None:
        line = {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
        text = json.dumps(line | common | {"at_s": round(time.monotonic() - began, 1)})
        print(text, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n")

    if "train" in args.parts:
        train(layer, args.tokens, args.repeats, emit)
    for batch in args.batches if "decode" in args.parts else ():
        if time.monotonic() - began < args.seconds:
            decode(layer, batch, 200, args.repeats, emit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
