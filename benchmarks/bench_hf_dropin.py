"""A patched linear-attention layer beside transformers' own: step time and memory, on one GPU.

    python3 benchmarks/bench_hf_dropin.py --out results.jsonl     Qwen3.5-like sizes, bf16
    python3 benchmarks/bench_hf_dropin.py --tiny                  a smoke check, on the CPU too

One layer, forward and backward over 8192 tokens: as one sequence, and as 8 packed documents.
transformers takes fla and causal-conv1d where they import; packed, it is given the offsets, and
without those kernels it refuses them, which is said.
"""

from __future__ import annotations

import argparse
import copy
import json
import time

import torch
from measure import environment, memory_mib, time_ms, write_lines
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from megatron_gdn.hf.drop_in.layer import DropInOptions, become_drop_in


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE"))
    parser.add_argument("--backend", default="auto", help="of the rule in the patched layer")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="sizes for a smoke check")
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def layers(args: argparse.Namespace, device: str) -> dict[str, torch.nn.Module]:
    keys, values = (2, 4) if args.tiny else args.heads
    hidden, dim = (32, 16) if args.tiny else (args.hidden, 128)
    config = Qwen3_5TextConfig(
        hidden_size=hidden, num_hidden_layers=4, linear_num_key_heads=keys,
        linear_num_value_heads=values, linear_key_head_dim=dim, linear_value_head_dim=dim,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    theirs = Qwen3_5GatedDeltaNet(config, 0).to(device, dtype)
    found = {"transformers": theirs}
    for name, options in (("patched", {}), ("patched, recomputing", {"recompute_qkv": True})):
        found[name] = copy.deepcopy(theirs)
        become_drop_in(
            found[name], config, DropInOptions(backend=args.backend, unpacked="fused", **options)
        )
    return found


def cases(args: argparse.Namespace, device: str) -> dict[str, dict]:
    tokens, documents = (256, 4) if args.tiny else (args.tokens, args.documents)
    # Lengths like those of texts: the longest is several times the shortest.
    weight = torch.arange(1, documents + 1, dtype=torch.float64)
    ends = (weight.cumsum(0) / weight.sum() * tokens).round().to(torch.int32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    longest = int(offsets.diff().max())
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
              "max_length_q": longest, "max_length_k": longest}  # fmt: skip
    packed = {k: v.to(device) if torch.is_tensor(v) else v for k, v in packed.items()}
    position = torch.arange(tokens, dtype=torch.int32)
    index = torch.searchsorted(offsets[1:], position, right=True).to(device, torch.int32)
    return {
        f"1x{tokens}": {},
        f"{documents} documents in {tokens}": packed | {"seq_idx": index[None]},
    }


def step_of(layer: torch.nn.Module, x: torch.Tensor, told: dict):
    grad = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x, **told).backward(grad)

    return step


def measured(layer, x, told, args) -> dict[str, object]:
    step = step_of(layer, x, told)
    if x.is_cuda:
        times = time_ms(step, repeats=args.repeats)
        memory = memory_mib(lambda: layer(x, **told))
        return {"ms": times, "memory": memory}
    step()
    began = time.perf_counter()
    step()
    return {"ms": {"median": (time.perf_counter() - began) * 1e3}, "memory": None}


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, rows = layers(args, device), []
    setting = environment() if device == "cuda" else {"gpu": "none", "torch": torch.__version__}
    for case, told in cases(args, device).items():
        tokens = 256 if args.tiny else args.tokens
        dtype = found["transformers"].out_proj.weight.dtype
        x = torch.randn(1, tokens, found["transformers"].hidden_size, device=device, dtype=dtype)
        x.requires_grad_()
        for name, layer in found.items():
            record = {"case": case, "layer": name, **setting}
            try:
                record |= measured(layer, x, told, args)
            except (ValueError, RuntimeError) as error:
                record["refused"] = str(error).splitlines()[0]
            rows.append(record)
            print(json.dumps(record))
    write_lines(args.out, rows)


if __name__ == "__main__":
    main()
