"""A patched linear-attention layer beside transformers' own: time, memory, error.

One layer, forward and backward, over packed documents and over one sequence.
transformers takes fla and causal-conv1d where they import; packed, it is given the
offsets, and without those kernels it refuses them, which is said. The patched layer is
given the documents as a patched model hands them to its layers: resolved, which the
model does once for all of them. fla is kept from calling FlashQLA, which it does where
that is installed (``--set core=flash_qla`` lets it). The errors are against the plain
rule in fp32 (float64 on the CPU): what is timed is right.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from lib.calls import distances, furthest
from lib.layers import DEVICE
from lib.measure import memory_mib, time_of
from lib.session import Session
from transformers import Qwen3_5TextConfig  # which imports fla
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from megatron_gdn.hf.drop_in.layer import DropInOptions, become_drop_in, resolve_batch
from megatron_gdn.hf.drop_in.sources import Sources


def config_of(row: dict[str, Any]) -> Qwen3_5TextConfig:
    keys, values = row["heads"]
    return Qwen3_5TextConfig(
        hidden_size=row["hidden"],
        num_hidden_layers=4,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=row["head_dim"],
        linear_value_head_dim=row["head_dim"],
    )


def patched(
    theirs: torch.nn.Module, config: Qwen3_5TextConfig, **options
) -> torch.nn.Module:
    layer = copy.deepcopy(theirs)
    become_drop_in(layer, config, DropInOptions(unpacked="fused", **options))
    return layer


def cases(tokens: int, documents: int, device: str) -> dict[str, dict]:
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


def measured(layer: torch.nn.Module, x: torch.Tensor, told: dict, repeats: int) -> dict:
    x = x.detach().requires_grad_()
    grad = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x, **told).backward(grad)

    made: dict[str, Any] = {"forward_backward": time_of(step, repeats)}
    if x.is_cuda:
        made |= memory_mib(lambda: layer(x, **told))
    return made


def layers(session: Session) -> None:
    row = session.row
    if session.args.tiny:
        row = row | row["tiny"]
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    wide = torch.float32 if DEVICE == "cuda" else torch.float64
    config = config_of(row)
    torch.manual_seed(0)
    theirs = Qwen3_5GatedDeltaNet(config, 0).to(DEVICE, dtype)
    found = {}
    for name in session.args.layers or row["layers"]:
        options = row["layers"][name]
        if name == "transformers":
            found[name] = theirs
        else:
            found[name] = patched(theirs, config, **options)
    # The gates of the patched layers are fp32 in a bf16 layer, with the same values.
    exact = patched(copy.deepcopy(theirs).to(wide), config, backend="reference")
    packages = {name: version_of(name) for name in ("transformers", "causal-conv1d")}
    for case, told in cases(row["tokens"], row["documents"], DEVICE).items():
        x = torch.randn(1, row["tokens"], row["hidden"], device=DEVICE, dtype=dtype)
        truth = results_of(exact, x, told)
        for name, layer in found.items():
            mine = told if layer is theirs else resolved(layer, x, told)
            names = {"case": case, "layer": name}
            run = partial(record_of, layer, x, mine, truth, session.repeats)
            record = session.attempt(names, run)
            if record is not None:
                session.emit({**names, **record, **packages})


def record_of(
    layer: torch.nn.Module, x: torch.Tensor, told: dict, truth: dict, repeats: int
) -> dict[str, Any]:
    off = distances(results_of(layer, x, told), truth)
    made = measured(layer, x, told, repeats)
    return made | {"error": off, "furthest": furthest(off)}


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
