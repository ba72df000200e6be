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
from typing import Any

import torch
from lib.calls import distances, furthest, with_backward
from lib.cases import Case
from lib.measure import memory_mib, time_of, version_of
from lib.model import DEVICE
from lib.session import Session
from transformers import Qwen3_5TextConfig  # which imports fla
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from megatron_gdn.hf.drop_in.layer import DropInOptions, become_drop_in, resolve_batch
from megatron_gdn.hf.drop_in.sources import BoundarySources


def patched(theirs: torch.nn.Module, config: Any, **options: Any) -> torch.nn.Module:
    layer = copy.deepcopy(theirs)
    become_drop_in(layer, config, DropInOptions(unpacked="fused", **options))
    return layer


def told_of(case: Case) -> dict[str, Any]:
    """What transformers tells a layer of the documents."""
    if case.lengths is None:
        return {}
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=DEVICE)
    documents = torch.arange(len(case.lengths), dtype=torch.int32, device=DEVICE)
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(case.lengths),
        "max_length_k": max(case.lengths),
        "seq_idx": documents.repeat_interleave(offsets.diff())[None],
    }


def resolved(layer: Any, x: torch.Tensor, told: dict[str, Any]) -> dict[str, Any]:
    """What a patched model hands to this layer instead."""
    if not told:
        return told
    sources = BoundarySources(None, None, told["cu_seq_lens_q"], None)
    return {"gdn_batch": resolve_batch(layer.drop_in.options, sources, x, None)}


def results_of(layer: Any, x: torch.Tensor, told: dict[str, Any]) -> dict[str, Any]:
    """Output and gradients of one step, by the names of transformers' parameters."""
    dtype = layer.out_proj.weight.dtype
    x = x.detach().to(dtype).requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x, **told)
    generator = torch.Generator(x.device).manual_seed(1)
    y.backward(torch.randn(y.shape, device=x.device, generator=generator).to(dtype))
    found = {"y": y.detach(), "dx": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    return found


def record_of(
    layer: Any, x: torch.Tensor, told: dict, truth: dict, repeats: int
) -> dict[str, Any]:
    off = distances(results_of(layer, x, told), truth)
    x = x.detach().requires_grad_()
    run = partial(layer, x, **told)
    made: dict[str, Any] = {}
    made["forward_backward"] = time_of(with_backward(run, layer, x), repeats)
    if x.is_cuda:
        made |= memory_mib(run)
    return made | {"error": off, "furthest": furthest(off)}


def layers(session: Session) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    wide = torch.float32 if DEVICE == "cuda" else torch.float64
    sizes = session.sizes()
    key_heads, value_heads = sizes.heads
    config = Qwen3_5TextConfig(
        hidden_size=sizes.hidden,
        num_hidden_layers=4,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=sizes.head_dim,
        linear_value_head_dim=sizes.head_dim,
    )
    torch.manual_seed(0)
    theirs = Qwen3_5GatedDeltaNet(config, 0).to(DEVICE, dtype)
    found: dict[str, Any] = {"transformers": theirs}
    for name, options in session.row["layers"].items():
        if name != "transformers":
            found[name] = patched(theirs, config, **options)
    # The gates of the patched layers are fp32 in a bf16 layer, with the same values.
    exact = patched(copy.deepcopy(theirs).to(wide), config, backend="reference")
    packages = {name: version_of(name) for name in ("transformers", "causal-conv1d")}
    for case in session.cases():
        told = told_of(case)
        x = torch.randn(1, case.tokens, sizes.hidden, device=DEVICE, dtype=dtype)
        truth = results_of(exact, x, told)
        for name in session.args.layers or found:
            layer = found[name]
            mine = told if layer is theirs else resolved(layer, x, told)
            names = {"case": case.name, "layer": name}
            run = partial(record_of, layer, x, mine, truth, session.repeats)
            record = session.attempt(names, run)
            if record is not None:
                session.emit({**names, **record, **packages})
