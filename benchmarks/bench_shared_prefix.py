"""A hybrid model on shared prefixes: as trees, and packed separately, with two
attentions.

    python3 -m megatron_gdn.warm_up --heads 16:32 --uses cut      one GPU: its kernels,
                                                                  side by side
    python3 benchmarks/bench_shared_prefix.py --out benchmarks/results/shared_prefix.jsonl
    OMP_NUM_THREADS=1 python3 benchmarks/bench_shared_prefix.py --toy                       a CPU

16 layers, 12 of Gated DeltaNet and 4 of attention, each with an MLP; a step is a
forward and a backward of the same weighted sum of the losses of all documents' tokens.
First, at a smaller size, logits and gradients in bf16, each way's distance from fp64
(one sequence after the other, plain torch). Then times in turns, and peak memory.

    responses  a prompt of 2,048 tokens and 16 responses of 256
    turns      a prompt of 2,048 tokens and 8 turns; a turn has 4 branches of 256, of
               which the first one is continued

    tree       flex_attention, prefixes computed once
    flex       packed separately, flex_attention
    te         packed separately, Transformer Engine's attention (with ``--modules te``)
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from lib.layers import DEVICE, start_megatron, thd
from lib.measure import environment, write_lines
from torch import Tensor, nn

from megatron_gdn import tree_packed_seq_params

PATTERN = "G-G-G-*-"
VOCABULARY = 8192
BF16 = torch.bfloat16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", choices=("te", "local"), default="te")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed steps of each way, in turns"
    )
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument(
        "--lengths", type=int, default=256, help="tokens of a response or branch"
    )
    parser.add_argument(
        "--most-tokens",
        type=int,
        default=36864,
        help="of a micro-batch packed separately; halved if it fails",
    )
    parser.add_argument(
        "--toy", action="store_true", help="tiny, local modules, for a CPU"
    )
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    if args.toy:
        args.modules = "local"
        args.hidden = 64
        args.prompt = 40
        args.lengths = 9
        args.most_tokens = 300
        args.repeats = 1
    return args


class Trained(NamedTuple):
    """Documents of which each may continue another, and what is computed of their
    tokens."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: Tensor  # [T], as the labels and the weights of the losses
    labels: Tensor
    weights: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int]) -> Trained:
        made = torch.Generator().manual_seed(1)
        T = sum(lengths)
        tokens, labels = torch.randint(VOCABULARY, (2, T), generator=made)
        weights = torch.rand(T, generator=made) / T
        moved = (x.to(DEVICE) for x in (tokens, labels, weights))
        return cls(tuple(lengths), tuple(parents), *moved)

    def rows(self, document: int) -> list[int]:
        start = sum(self.lengths[:document])
        return list(range(start, start + self.lengths[document]))

    def sequences(self) -> list[tuple[list[int], list[int]]]:
        """Of each document that none continues, with all before it: the rows of its
        tokens, and how many of the last ones are not of an earlier sequence."""
        found = []
        seen = set()
        for leaf in sorted(set(range(len(self.parents))) - set(self.parents)):
            path = [leaf]
            while self.parents[path[0]] >= 0:
                path.insert(0, self.parents[path[0]])
            new = [document for document in path if document not in seen]
            seen.update(path)
            rows = [row for document in path for row in self.rows(document)]
            found.append(
                (rows, [row for document in new for row in self.rows(document)])
            )
        return found


class MicroBatch(NamedTuple):
    rows: Tensor  # of each of its tokens, the row in the tree's buffer
    kept: Tensor  # which of its tokens have a loss; all other tokens are copies
    params: Any


def as_tree(trained: Trained) -> list[MicroBatch]:
    rows = torch.arange(len(trained.tokens), device=DEVICE)
    params = tree_packed_seq_params(trained.lengths, trained.parents, device=DEVICE)
    return [MicroBatch(rows, rows, params)]


def separately(trained: Trained, most_tokens: int, way: str) -> list[MicroBatch]:
    """Micro-batches whose documents continue none; as a tree, ``flex_attention`` takes
    them."""
    groups: list[list] = [[]]
    for sequence in trained.sequences():
        if groups[-1] and sum(len(x[0]) for x in (*groups[-1], sequence)) > most_tokens:
            groups.append([])
        groups[-1].append(sequence)
    made = []
    for group in groups:
        rows = [row for of_tokens, _ in group for row in of_tokens]
        ends = list(accumulate((len(x[0]) for x in group), initial=0))
        last = zip(ends[1:], (len(new) for _, new in group), strict=True)
        kept = [row for end, count in last for row in range(end - count, end)]
        moved = (torch.tensor(x, device=DEVICE) for x in (rows, kept))
        lengths = [len(x[0]) for x in group]
        as_tree = tree_packed_seq_params(lengths, [-1] * len(group), device=DEVICE)
        made.append(MicroBatch(*moved, as_tree if way == "flex" else thd(ends)))
    return made


def build(args, modules: str, dtype: torch.dtype) -> nn.Module:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.specs import hybrid_stack_spec

    size = min(128, args.hidden // 4)
    heads = args.hidden // size
    bf16 = dtype is BF16
    config = TransformerConfig(
        num_layers=4 * len(PATTERN),
        hidden_size=args.hidden,
        ffn_hidden_size=2 * args.hidden,
        num_attention_heads=heads,
        num_query_groups=max(1, heads // 4),
        kv_channels=size,
        linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        linear_conv_kernel_dim=4,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        bf16=bf16,
        params_dtype=BF16 if bf16 else torch.float32,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=DEVICE == "cpu",
    )
    torch.manual_seed(5)
    backend = {} if bf16 else {"backend": "reference"}
    model = HybridModel(
        config,
        hybrid_stack_spec(modules, **backend),
        vocab_size=VOCABULARY,
        max_sequence_length=8192,
        hybrid_layer_pattern=4 * PATTERN,
        position_embedding_type="rope",
    )
    return model.to(DEVICE) if bf16 else model.to(DEVICE, dtype)


def names_of_local(name: str) -> str:
    """A parameter of Transformer Engine's modules, as local ones name it."""
    if not name.endswith(".layer_norm_weight"):
        return name
    layer, linear = name.removesuffix(".layer_norm_weight").rsplit(".", 1)
    layer, part = layer.rsplit(".", 1)
    return (
        f"{layer}.{'pre_mlp_layernorm' if part == 'mlp' else 'input_layernorm'}.weight"
    )


def step(
    model: nn.Module, trained: Trained, batches: list[MicroBatch], keep: bool = False
):
    """One backward of all micro-batches; with ``keep``, the logits of all documents'
    tokens."""
    for parameter in model.parameters():
        parameter.grad = None
    logits = None
    for rows, kept, params in batches:
        positions = torch.arange(len(rows), device=DEVICE)[None]
        given = {"packed_seq_params": params}
        if keep:
            out = model(trained.tokens[rows][None], positions, None, **given)[0][kept]
            if logits is None:
                logits = out.new_zeros(len(trained.tokens), out.shape[1])
            logits[rows[kept]] = out.detach()
            losses = nn.functional.cross_entropy(
                out.float() if out.dtype is BF16 else out,
                trained.labels[rows][kept],
                reduction="none",
            )
        else:
            labels = trained.labels[rows][None]
            out = model(
                trained.tokens[rows][None], positions, None, labels=labels, **given
            )
            losses = out[0][kept]
        (losses * trained.weights[rows][kept]).sum().backward()
    return logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        names_of_local(name): parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Root mean squares of differences over those of what is right: all together, and
    the worst."""
    squares = [
        (n, (x.double() - right[n]).square().sum(), right[n].square().sum())
        for n, x in found.items()
    ]
    each = {name: (off / of).sqrt().item() for name, off, of in squares if of != 0}
    off, of = (torch.stack([x[i] for x in squares]).sum() for i in (1, 2))
    # NaN is larger than every number.
    worst = max(each, key=lambda name: (math.isnan(each[name]), each[name]))
    return {"all": (off / of).sqrt().item(), "worst": each[worst], "name": worst}


def check(
    args, model: nn.Module, ways: Sequence[str], trained: Trained
) -> dict[str, Any]:
    """Distances in bf16 from fp64, of trees and of separate packing."""
    exact = build(args, "local", torch.float64)
    # Megatron's stack ends in TE's norm anyway
    for name, module in list(exact.named_modules()):
        if type(module).__module__.startswith("transformer_engine"):
            norm = nn.RMSNorm(args.hidden, eps=1e-5, dtype=torch.float64, device=DEVICE)
            exact.set_submodule(name, norm)
    weights = {names_of_local(name): x.detach() for name, x in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(weights[name])
    one_by_one = separately(trained, 1, "te")
    logits = step(exact, trained, one_by_one, keep=True)
    right = gradients(exact) | {"logits": logits}
    del exact
    found = {}
    for way in ways:
        batches = as_tree(trained) if way == "tree" else separately(trained, 10**9, way)
        logits = step(model, trained, batches, keep=True)
        found[way] = {
            "logits": distance({"logits": logits}, right)["all"],
            "gradients": distance(gradients(model), right),
        }
        free()
    return found


def free() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def seconds(model, trained, batches) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step(model, trained, batches)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def first_step(
    model, trained, way: str, most_tokens: int
) -> tuple[list[MicroBatch], float, int]:
    """Micro-batches that fit into memory, the peak of a step in GiB, and their most
    tokens."""
    while True:
        batches = (
            as_tree(trained) if way == "tree" else separately(trained, most_tokens, way)
        )
        try:
            seconds(model, trained, batches)  # compiles
            free()
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds(model, trained, batches)
            peak = (
                torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
            )
            return batches, peak, max(len(batch.rows) for batch in batches)
        except torch.OutOfMemoryError:
            if way == "tree" or most_tokens < 2 * len(trained.sequences()[0][0]):
                raise
            most_tokens //= 2
        free()


def measure(
    args, model: nn.Module, ways: Sequence[str], trained: Trained
) -> dict[str, Any]:
    batches = {}
    found = {}
    for way in ways:
        batches[way], peak, largest = first_step(model, trained, way, args.most_tokens)
        tokens = sum(len(batch.rows) for batch in batches[way])
        found[way] = {
            "tokens": tokens,
            "micro_batches": len(batches[way]),
            "tokens_of_the_largest": largest,
            "peak_gib": peak,
        }
        print(f"  {way}: {found[way]}", flush=True)
        free()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.repeats):
        for way in ways:
            times[way].append(1e3 * seconds(model, trained, batches[way]))
    for way in ways:
        found[way] |= {
            "median_ms": statistics.median(times[way]),
            "ms": sorted(times[way]),
        }
    tree = found["tree"]
    for way in ways[1:]:
        found[way]["tree_over_this"] = {
            "step": tree["median_ms"] / found[way]["median_ms"],
            "peak": tree["peak_gib"] / max(found[way]["peak_gib"], 1e-9),
            "tokens": tree["tokens"] / found[way]["tokens"],
        }
    return found


def cases(prompt: int, length: int, responses: int, turns: int) -> dict[str, Trained]:
    parents = [-1]
    continued = 0
    for _ in range(turns):
        first = len(parents)
        parents += [continued] * 4
        continued = first
    return {
        "responses": Trained.of(
            [prompt, *[length] * responses], [-1, *[0] * responses]
        ),
        "turns": Trained.of([prompt, *[length] * 4 * turns], parents),
    }


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    start_megatron()
    model = build(args, args.modules, BF16)
    setting = {
        "environment": environment(),
        "hidden": args.hidden,
        "modules": args.modules,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    ways = ("tree", "flex", "te") if args.modules == "te" else ("tree", "flex")

    def record(what: str, case: str, found: dict[str, Any]) -> None:
        seconds_so_far = round(time.perf_counter() - began)
        line = {
            "what": what,
            "case": case,
            **found,
            "seconds_so_far": seconds_so_far,
            **setting,
        }
        write_lines(args.out, [line])
        print(json.dumps(line), flush=True)

    for case, trained in cases(args.prompt // 2, args.lengths // 2, 4, 2).items():
        record("distance from fp64", case, check(args, model, ways, trained))
    free()
    for case, trained in cases(args.prompt, args.lengths, 16, 8).items():
        record("step", case, measure(args, model, ways, trained))


if __name__ == "__main__":
    main()
