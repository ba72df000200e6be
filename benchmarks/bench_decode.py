"""Time of a layer's decode step against the floor of reading and writing its states.

    python3 benchmarks/bench_decode.py --out decode.jsonl  # a GPU: a Qwen3-Next layer
                                                           # in bf16
    python3 benchmarks/bench_decode.py --mixer mamba2      # likewise a Mamba2 mixer
    python3 benchmarks/bench_decode.py --tiny              # anywhere: does it run

A line per batch: milliseconds per eager step of the layer in Megatron's
StaticInferenceContext, and its ratio to the floor, which is the bytes of histories and
states, read and written, at the bandwidth of a copy measured here. A step costs the
same after any number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

_WARM_UP = 3  # calls that are not counted
SIZES = {  # of a layer of Qwen3-Next, and of a Mamba2 mixer
    "gdn": {
        "hidden_size": 2048,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "mamba2": {
        "hidden_size": 2048,
        "mamba_num_heads": 64,
        "mamba_num_groups": 8,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
    },
}
TINY = {
    "gdn": {
        "hidden_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
    "mamba2": {
        "hidden_size": 32,
        "mamba_num_heads": 4,
        "mamba_num_groups": 2,
        "mamba_head_dim": 16,
        "mamba_state_dim": 16,
    },
}


def build_layer(mixer: str, sizes: dict, dtype: torch.dtype, device: str, backend: str):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.compat.one_process import run_megatron_on_cpu
    from megatron_gdn.specs import gated_delta_net_spec, mamba2_spec

    run_megatron_on_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=4,
        normalization="RMSNorm",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **sizes,
    )
    if mixer == "gdn":
        spec = gated_delta_net_spec("local", backend=backend)
        more = {}
    else:
        spec = mamba2_spec("local", backend=backend)
        more = {"d_model": sizes["hidden_size"]}
    return build_module(spec, config, layer_number=1, **more).to(device).eval()


def milliseconds(run, repeats: int, on_gpu: bool) -> float:
    """The median of single calls."""
    times = []
    for _ in range(repeats + _WARM_UP):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[_WARM_UP:])


def copy_rate(on_gpu: bool, repeats: int) -> float:
    """Bytes read and written per millisecond by a copy of 1 GiB (1 MiB without a
    GPU)."""
    size = 1 << (30 if on_gpu else 20)
    source = torch.empty(size, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), repeats, on_gpu)


@torch.inference_mode()
def measure(layer, batch: int, repeats: int, rate: float) -> dict:
    from megatron.core.inference.contexts import StaticInferenceContext

    weight = layer.conv_parameters[0]
    hidden = layer.config.hidden_size
    prompt = 8
    context = StaticInferenceContext(batch, prompt + repeats + _WARM_UP)
    x = torch.randn(prompt, batch, hidden, dtype=weight.dtype, device=weight.device)

    def step(x):
        layer(x, inference_context=context)
        context.increment_sequence_len_offset(len(x))

    step(x)
    memory = context.key_value_memory_dict[layer.layer_number]
    floor = 2 * sum(t.numel() * t.element_size() for t in memory) / rate
    took = milliseconds(lambda: step(x[:1]), repeats, weight.is_cuda)
    return {
        "batch": batch,
        "dtype": str(weight.dtype),
        "floor_ms": floor,
        "layer_ms": took,
        "layer_over_floor": took / floor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append lines to")
    parser.add_argument("--mixer", choices=tuple(SIZES), default="gdn")
    parser.add_argument("--tiny", action="store_true", help="a small layer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument(
        "--backend",
        default="reference",
        help="rule of the prefill; this one compiles nothing",
    )
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if args.tiny:
        args.batches = [1, 3]
        args.repeats = 3
    dtype = torch.bfloat16 if on_gpu else torch.float32
    place = "cuda" if on_gpu else "cpu"
    sizes = (TINY if args.tiny else SIZES)[args.mixer]
    layer = build_layer(args.mixer, sizes, dtype, place, args.backend)
    rate = copy_rate(on_gpu, args.repeats)
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    for batch in args.batches:
        line = measure(layer, batch, args.repeats, rate)
        line |= {
            "mixer_kind": args.mixer,
            "device": device,
            "copy_gb_per_s": rate / 1e6,
        }
        print(json.dumps(line), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
