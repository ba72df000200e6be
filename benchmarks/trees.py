"""A hybrid model on shared prefixes: as trees, and packed separately, with two
attentions.

16 layers, 12 of Gated DeltaNet and 4 of attention, each with an MLP; a step is a
forward and a backward of the same weighted sum of the losses of all documents' tokens.
Ways take turns. ``furthest`` is the largest distance of a way's gradients from those
of the first way: both are bf16.

    responses  a prompt of 2,048 tokens and 16 responses of 256
    turns      a prompt of 2,048 tokens and 8 turns; a turn has 4 branches of 256, of
               which the first one is continued

    tree       flex_attention, prefixes computed once
    flex       packed separately, flex_attention
    te         packed separately, Transformer Engine's attention
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from lib.calls import distances, furthest
from lib.layers import start_megatron, thd
from lib.measure import synchronize
from lib.model import DEVICE, gdn_sizes, hybrid_model, transformer_config
from lib.session import Session, release
from torch import Tensor, nn

from megatron_gdn import tree_packed_seq_params
from megatron_gdn.specs import hybrid_stack_spec

PATTERN = "G-G-G-*-"
VOCABULARY = 8192


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

    def rows(self, documents: Sequence[int]) -> list[int]:
        ends = list(accumulate(self.lengths))
        return [
            row for i in documents for row in range(ends[i] - self.lengths[i], ends[i])
        ]

    def sequences(self) -> list[tuple[list[int], int]]:
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
            found.append((self.rows(path), len(self.rows(new))))
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
    groups: list[list[tuple[list[int], int]]] = [[]]
    for sequence in trained.sequences():
        if groups[-1] and sum(len(x[0]) for x in (*groups[-1], sequence)) > most_tokens:
            groups.append([])
        groups[-1].append(sequence)
    made = []
    for group in groups:
        rows = [row for of_tokens, _ in group for row in of_tokens]
        lengths = [len(of_tokens) for of_tokens, _ in group]
        kept = []
        for end, (_, new) in zip(accumulate(lengths), group, strict=True):
            kept += range(end - new, end)
        moved = (torch.tensor(x, device=DEVICE) for x in (rows, kept))
        if way == "flex":
            roots = [-1] * len(group)
            params = tree_packed_seq_params(lengths, roots, device=DEVICE)
        else:
            params = thd([0, *accumulate(lengths)])
        made.append(MicroBatch(*moved, params))
    return made


def build(hidden: int, modules: str) -> nn.Module:
    size = min(128, hidden // 4)
    heads = hidden // size
    config = transformer_config(
        hidden,
        torch.bfloat16,
        num_layers=4 * len(PATTERN),
        ffn_hidden_size=2 * hidden,
        num_attention_heads=heads,
        num_query_groups=max(1, heads // 4),
        kv_channels=size,
        gated_linear_unit=True,
        **gdn_sizes(heads, 2 * heads, size),
    )
    torch.manual_seed(5)
    spec = hybrid_stack_spec(modules)
    return hybrid_model(config, spec, 4 * PATTERN, VOCABULARY, 8192).to(DEVICE)


def step(model: nn.Module, trained: Trained, batches: list[MicroBatch]) -> float:
    """The seconds of one forward and backward of all micro-batches."""
    model.zero_grad()
    synchronize()
    began = time.perf_counter()
    for rows, kept, params in batches:
        positions = torch.arange(len(rows), device=DEVICE)[None]
        losses = model(
            trained.tokens[rows][None],
            positions,
            None,
            labels=trained.labels[rows][None],
            packed_seq_params=params,
        )
        (losses[0][kept] * trained.weights[rows][kept]).sum().backward()
    synchronize()
    return time.perf_counter() - began


def peak_gib(model: nn.Module, trained: Trained, batches: list[MicroBatch]) -> float:
    step(model, trained, batches)  # compiles
    release()
    if DEVICE == "cpu":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    step(model, trained, batches)
    return torch.cuda.max_memory_allocated() / 2**30


def times_of(session: Session, model: nn.Module, case: str, trained: Trained) -> None:
    """Times in turns, peak memory, and the distance of gradients."""
    row = session.row
    batches = {}
    found: dict[str, dict[str, Any]] = {}
    first: dict[str, Tensor] = {}
    ways = session.args.layers or list(row["layers"])
    if row["modules"] != "te" and "te" in ways:
        ways.remove("te")
    for way in ways:
        if way == "tree":
            batches[way] = as_tree(trained)
        else:
            batches[way] = separately(trained, row["most_tokens"], way)
        peak = peak_gib(model, trained, batches[way])
        gradients = {
            # not on the GPU, whose peak is measured
            name: parameter.grad.to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        first = first or gradients
        found[way] = {
            "tokens": sum(len(batch.rows) for batch in batches[way]),
            "micro_batches": len(batches[way]),
            "peak_gib": peak,
            "furthest": furthest(distances(gradients, first)),
        }
        session.say(f"  {way}: {found[way]}")
        del gradients
        release()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(session.repeats):
        for way in ways:
            times[way].append(1e3 * step(model, trained, batches[way]))
    for way in ways:
        record = {"case": case, "layer": way, **found[way]}
        record["median_ms"] = statistics.median(times[way])
        session.emit(record | {"ms": sorted(times[way])})


def cases(prompt: int, length: int) -> dict[str, Trained]:
    responses = Trained.of([prompt, *[length] * 16], [-1, *[0] * 16])
    parents = [-1]
    continued = 0
    for _ in range(8):
        first = len(parents)
        parents += [continued] * 4
        continued = first
    turns = Trained.of([prompt, *[length] * 32], parents)
    return {"responses": responses, "turns": turns}


def trees(session: Session) -> None:
    start_megatron()
    row = session.row
    model = build(row["hidden"], row["modules"])
    for case, trained in cases(row["prompt"], row["lengths"]).items():
        if not session.late(case):
            times_of(session, model, case, trained)
