"""A hybrid model on shared prefixes: as trees, and packed separately, with two
attentions.

16 layers, 12 of Gated DeltaNet and 4 of attention, each with an MLP; a step is a
forward and a backward of the same weighted sum of the losses of all documents' tokens.
First, at a smaller size, logits and gradients in bf16, each way's distance from fp64.
Then times in turns, and peak memory.

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
from lib.layers import DEVICE, start_megatron, thd
from lib.session import Session, release
from torch import Tensor, nn

from megatron_gdn import tree_packed_seq_params

PATTERN = "G-G-G-*-"
VOCABULARY = 8192
BF16 = torch.bfloat16


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


def build(hidden: int, modules: str, dtype: torch.dtype) -> nn.Module:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.specs import hybrid_stack_spec

    size = min(128, hidden // 4)
    heads = hidden // size
    bf16 = dtype is BF16
    config = TransformerConfig(
        num_layers=4 * len(PATTERN),
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
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


def distances_from_fp64(
    hidden: int, model: nn.Module, ways: Sequence[str], trained: Trained
) -> dict[str, Any]:
    """Of logits and gradients in bf16, for each way; exact is one sequence after the
    other, in plain torch."""
    exact = build(hidden, "local", torch.float64)
    # Megatron's stack ends in TE's norm anyway
    for name, module in list(exact.named_modules()):
        if type(module).__module__.startswith("transformer_engine"):
            norm = nn.RMSNorm(hidden, eps=1e-5, dtype=torch.float64, device=DEVICE)
            exact.set_submodule(name, norm)
    weights = {names_of_local(name): x.detach() for name, x in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(weights[name])
    logits = step(exact, trained, separately(trained, 1, "te"), keep=True)
    right = gradients(exact)
    del exact
    found = {}
    for way in ways:
        batches = as_tree(trained) if way == "tree" else separately(trained, 10**9, way)
        of_logits = distances(
            {"all": step(model, trained, batches, keep=True)}, {"all": logits}
        )
        of_gradients = distances(gradients(model), right)
        found[way] = {
            "logits": of_logits["all"],
            "gradients": furthest(of_gradients),
            "of_gradients": of_gradients,
        }
        release()
    return found


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
            release()
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
        release()


def times_of(
    session: Session, row: dict[str, Any], model: nn.Module, case: str, trained: Trained
) -> None:
    """Times in turns, and peak memory."""
    ways = ways_of(session, row)
    batches = {}
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        batches[way], peak, largest = first_step(
            model, trained, way, row["most_tokens"]
        )
        found[way] = {
            "tokens": sum(len(batch.rows) for batch in batches[way]),
            "micro_batches": len(batches[way]),
            "tokens_of_the_largest": largest,
            "peak_gib": peak,
        }
        session.say(f"  {way}: {found[way]}")
        release()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(session.repeats):
        for way in ways:
            times[way].append(1e3 * seconds(model, trained, batches[way]))
    for way in ways:
        median = statistics.median(times[way])
        record = {"what": "step", "case": case, "layer": way, **found[way]}
        session.emit(record | {"median_ms": median, "ms": sorted(times[way])})


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


def ways_of(session: Session, row: dict[str, Any]) -> list[str]:
    ways = session.args.layers or list(row["layers"])
    return [way for way in ways if way != "te" or row["modules"] == "te"]


def trees(session: Session) -> None:
    start_megatron()
    row = session.row
    if session.args.tiny:
        row = row | row["tiny"]
    hidden = row["hidden"]
    model = build(hidden, row["modules"], BF16)
    ways = ways_of(session, row)
    prompt = row["prompt"]
    length = row["lengths"]
    for case, trained in cases(prompt // 2, length // 2, 4, 2).items():
        found = distances_from_fp64(hidden, model, ways, trained)
        for way, distance in found.items():
            names = {"what": "distance from fp64", "case": f"{case}, half the size"}
            session.emit({**names, "layer": way, **distance})
    release()
    for case, trained in cases(prompt, length, 16, 8).items():
        if not session.late(case):
            times_of(session, row, model, case, trained)
