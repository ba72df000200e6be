"""A patched linear-attention layer beside transformers' own: step time, memory, error,
on one GPU.

    python3 benchmarks/bench_hf_dropin.py --out results.jsonl  Qwen3.5-like sizes, bf16
    python3 benchmarks/bench_hf_dropin.py --tiny               a smoke check, on the CPU
                                                               too

One layer, forward and backward over 8192 tokens: as 8 packed documents, and as one
sequence. transformers takes fla and causal-conv1d where they import; packed, it is
given the offsets, and without those kernels it refuses them, which is said. The patched
layer is given the documents as a patched model hands them to its layers: resolved,
which the model does once for all of them. fla is kept from calling FlashQLA, which it
does where that is installed (FLA_FLASH_QLA=1 lets it). The errors are those of the
output, the input gradient and the worst parameter gradient against the plain rule in
fp32 (float64 on the CPU), root mean squares over that of the truth: what is timed is
right.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from importlib.metadata import PackageNotFoundError, version

import torch
from lib.measure import environment, memory_mib, time_ms, write_lines

os.environ.setdefault("FLA_FLASH_QLA", "0")
from transformers import Qwen3_5TextConfig  # noqa: E402  which imports fla
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet  # noqa: E402

from megatron_gdn.hf.drop_in.layer import (  # noqa: E402
    DropInOptions,
    become_drop_in,
    resolve_batch,
)
from megatron_gdn.hf.drop_in.sources import Sources  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["auto"],
        help="rules of the patched layer, one after one",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["transformers", "patched"],
        help="of these, which",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="sizes for a smoke check")
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def setting_of(device: str) -> dict[str, str]:
    found = (
        environment()
        if device == "cuda"
        else {"gpu": "none", "torch": torch.__version__}
    )
    for package in ("transformers", "causal-conv1d"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def config_of(args: argparse.Namespace) -> Qwen3_5TextConfig:
    keys, values = (2, 4) if args.tiny else args.heads
    hidden, dim = (32, 16) if args.tiny else (args.hidden, 128)
    return Qwen3_5TextConfig(
        hidden_size=hidden,
        num_hidden_layers=4,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
    )


def patched(
    theirs: torch.nn.Module, config: Qwen3_5TextConfig, **options
) -> torch.nn.Module:
    layer = copy.deepcopy(theirs)
    become_drop_in(layer, config, DropInOptions(unpacked="fused", **options))
    return layer


def cases(args: argparse.Namespace, device: str) -> dict[str, dict]:
    tokens, documents = (256, 4) if args.tiny else (args.tokens, args.documents)
    # Lengths like those of texts: the longest is several times the shortest.
    weight = torch.arange(1, documents + 1, dtype=torch.float64)
    ends = (weight.cumsum(0) / weight.sum() * tokens).round().to(torch.int32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    longest = int(offsets.diff().max())
    packed = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    packed = {k: v.to(device) if torch.is_tensor(v) else v for k, v in packed.items()}
    position = torch.arange(tokens, dtype=torch.int32)
    index = torch.searchsorted(offsets[1:], position, right=True).to(
        device, torch.int32
    )
    return {
        f"{documents} documents in {tokens}": packed | {"seq_idx": index[None]},
        f"1x{tokens}": {},
    }


def resolved(layer: torch.nn.Module, x: torch.Tensor, told: dict) -> dict:
    """What a patched model hands to this layer instead."""
    if "cu_seq_lens_q" not in told:
        return told
    sources = Sources(None, None, told["cu_seq_lens_q"], None)
    return {"gdn_batch": resolve_batch(layer.drop_in.options, sources, x, None)}


def results_of(
    layer: torch.nn.Module, x: torch.Tensor, told: dict
) -> dict[str, torch.Tensor]:
    """Output and gradients of one step, by the names of transformers' parameters."""
    dtype = layer.out_proj.weight.dtype
    x = x.detach().to(dtype).requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x, **told)
    generator = torch.Generator(x.device).manual_seed(1)
    y.backward(torch.randn(y.shape, device=x.device, generator=generator).to(dtype))
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        found[name] = parameter.grad
    layer.zero_grad(set_to_none=True)
    return found


def errors(
    layer, x: torch.Tensor, told: dict, truth: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Root mean square of the difference from the truth, over that of the truth."""
    found = results_of(layer, x, told)
    off = {
        name: (
            (found[name].double() - exact.double()).norm() / exact.double().norm()
        ).item()
        for name, exact in truth.items()
    }
    # NaN is larger than every number.
    parameters = [name for name in off if name not in ("y", "dx")]
    worst = max(parameters, key=lambda name: (math.isnan(off[name]), off[name]))
    return {"y": off["y"], "dx": off["dx"], f"worst parameter ({worst})": off[worst]}


def measured(
    layer, x: torch.Tensor, told: dict, args: argparse.Namespace
) -> dict[str, object]:
    x = x.detach().requires_grad_()
    grad = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x, **told).backward(grad)

    if x.is_cuda:
        times = time_ms(step, repeats=args.repeats)
        return {"ms": times, "memory": memory_mib(lambda: layer(x, **told))}
    step()
    began = time.perf_counter()
    step()
    return {"ms": {"median": (time.perf_counter() - began) * 1e3}, "memory": None}


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    exact = torch.float32
    if device == "cpu":
        dtype = torch.float32
        exact = torch.float64
    config = config_of(args)
    setting = setting_of(device)
    torch.manual_seed(0)
    theirs = Qwen3_5GatedDeltaNet(config, 0).to(device, dtype)
    layers = {"transformers": (theirs, None)} if "transformers" in args.layers else {}
    for backend in args.backend if "patched" in args.layers else ():
        layers[f"patched, {backend}"] = (
            patched(theirs, config, backend=backend),
            backend,
        )
        recomputing = patched(theirs, config, backend=backend, recompute_qkv=True)
        layers[f"patched, {backend}, recomputing"] = recomputing, backend
    # The gates of the patched layers are fp32 in a bf16 layer, with the same values.
    truth_layer = patched(copy.deepcopy(theirs).to(exact), config, backend="reference")
    for case, told in cases(args, device).items():
        tokens = 256 if args.tiny else args.tokens
        x = torch.randn(1, tokens, config.hidden_size, device=device, dtype=dtype)
        truth = results_of(truth_layer, x, told)
        for name, (layer, backend) in layers.items():
            record = {"case": case, "layer": name, "backend": backend}
            mine = told if backend is None else resolved(layer, x, told)
            try:
                record["error"] = errors(layer, x, mine, truth)
                record |= measured(layer, x, mine, args)
            except Exception as error:  # the other layers are measured still
                record["refused"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0]}"
                )
            print(json.dumps(record), flush=True)
            write_lines(args.out, [record | setting])


if __name__ == "__main__":
    main()
