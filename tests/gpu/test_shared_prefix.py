"""Trees and packed documents through flex_attention on a GPU; a hybrid model on trees
in bf16."""

from functools import partial

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.mixers.flex_attention import BLOCK_SIZE
from tests.distributed.layer_laws import thd
from tests.gpu.parallel_laws import rms
from tests.parallel import alone, hybrid_model, make_config, model_config
from tests.trees import Tree, random_tree, separately

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("world")]
HEADS = 4
GROUPS = 2
SIZE = 64
ANSWERS = Tree((-1, *[0] * 5), (700, 130, 1, 256, 40, 77))
TURNS = Tree((-1, 0, 0, 1, 1, 3, 3), (300, 90, 100, 5, 200, 128, 64), 4)


def core(**changes):
    from megatron_gdn.mixers.attention import TorchAttention

    sizes = {
        "hidden_size": HEADS * SIZE,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
    }
    config = make_config(**{**sizes, "attention_dropout": 0.0, **changes})
    return TorchAttention(config, 1, AttnMaskType.causal, "self", pg_collection=alone())


def plain_core(**changes):
    attention = core(**changes)
    attention._runs_flex = lambda query: False
    return attention


def make_rows(tokens: int, dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(tokens, 1, h, SIZE, device="cuda").bfloat16().to(dtype)
        for h in (HEADS, GROUPS, GROUPS)
    ]


def run(attention, rows, params, d_out) -> list[torch.Tensor]:
    rows = [x.clone().requires_grad_() for x in rows]
    out = attention(*rows, None, packed_seq_params=params).flatten(1)
    return [out, *torch.autograd.grad(out, rows, d_out.to(out.dtype))]


@pytest.mark.parametrize(
    "tree", [ANSWERS, TURNS, random_tree(4, 2), random_tree(7)], ids=str
)
def test_flex_attention_rounds_as_bf16_does(tree):
    """Twice the error of plain torch in bf16, from fp64 of the same numbers."""
    exact = make_rows(sum(tree.slots))
    rows = [x.bfloat16() for x in exact]
    d_out = torch.randn(len(rows[0]), HEADS * SIZE, device="cuda")
    right = run(core(), exact, tree.params_on("cuda"), d_out)
    found = run(core(bf16=True), rows, tree.params_on("cuda"), d_out)
    plain = run(plain_core(bf16=True), rows, tree.params_on("cuda"), d_out)
    for mine, theirs, truth in zip(found, plain, right, strict=True):
        assert mine.dtype == torch.bfloat16
        assert rms(mine.double() - truth) <= 2 * rms(theirs.double() - truth)


def test_packed_documents_round_as_bf16_does():
    lengths = (300, 1, 0, 128, 77)
    exact = make_rows(sum(lengths))
    rows = [x.bfloat16() for x in exact]
    d_out = torch.randn(506, HEADS * SIZE, device="cuda")
    params = thd(lengths, "cuda")
    right = run(core(), exact, params, d_out)
    plain = run(plain_core(), rows, params, d_out)
    for mine, theirs, truth in zip(
        run(core(), rows, params, d_out), plain, right, strict=True
    ):
        assert rms(mine.double() - truth) <= 2 * rms(theirs.double() - truth)


def test_a_branch_has_the_same_bits_whatever_its_siblings_in_slots_of_whole_blocks():
    """Its rows of output and gradients; and two runs have the same bits."""
    own = make_rows(2 * BLOCK_SIZE + 9 + 190, torch.bfloat16)
    d_own = torch.randn(190, HEADS * SIZE, device="cuda")
    found = []
    for siblings in ((), (), (1,), (500, 0, 3)):
        tree = Tree(
            (-1, *[0] * len(siblings), 0),
            (2 * BLOCK_SIZE + 9, *siblings, 190),
            BLOCK_SIZE,
        )
        rows = [*tree.tokens(0), *tree.tokens(len(siblings) + 1)]
        qkv = [
            torch.randn(sum(tree.slots), *x.shape[1:], device="cuda").bfloat16()
            for x in own
        ]
        for x, mine in zip(qkv, own, strict=True):
            x[rows] = mine
        d_out = torch.zeros(len(qkv[0]), HEADS * SIZE, device="cuda")
        d_out[rows[-190:]] = d_own
        out, *grads = run(core(), qkv, tree.params_on("cuda"), d_out)
        found.append([out[rows], *(x[rows[-190:]] for x in grads)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_other_lengths_do_not_compile_again_and_nothing_is_as_large_as_queries_times_keys():
    from torch._dynamo.utils import counters

    attention = core()
    compiled = []
    for responses in (3, 5, 8, 13, 21):
        tree = Tree((-1, *[0] * responses), (1024, *[100 + responses] * responses))
        rows = make_rows(sum(tree.slots), torch.bfloat16)
        d_out = torch.randn(len(rows[0]), HEADS * SIZE, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(attention, rows, tree.params_on("cuda"), d_out)
        peak = torch.cuda.max_memory_allocated() - before
        compiled.append(counters["stats"]["unique_graphs"])
    assert len(set(compiled[1:])) == 1
    assert peak < HEADS * len(rows[0]) ** 2  # a byte for each score


def test_a_hybrid_model_on_a_tree_rounds_as_it_does_on_separate_sequences():
    """Logits and all gradients in bf16: distances from fp64 of trees and of separate
    packing."""
    pattern = 2 * "G-G-*-"
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    sizes |= {"hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "ffn_hidden_size": 256,
    }
    tree = ANSWERS
    apart = separately(tree)
    tokens = torch.randint(32, (1, sum(tree.slots)), device="cuda")
    d_logits = torch.randn(len(apart.tokens), 32, device="cuda")
    weights = None

    def build(dtype):
        nonlocal weights
        bf16 = dtype is torch.bfloat16
        params = {"bf16": bf16, "params_dtype": dtype if bf16 else torch.float32}
        config = model_config(pattern, **sizes, **params, use_cpu_initialization=False)
        model = hybrid_model(
            config, pattern, max_sequence_length=2048, position_embedding_type="rope"
        )
        # Transformer Engine's norm, with which Megatron ends every stack, takes no
        # fp64.
        model.decoder.final_norm = TorchRMSNorm(config, config.hidden_size)
        model.to("cuda", dtype if not bf16 else None)
        weights = weights or model.state_dict()
        model.load_state_dict(weights, strict=False)
        return model

    def of(model, tokens, params, kept):
        model.zero_grad()
        logits = model(
            tokens,
            torch.arange(tokens.shape[1])[None].cuda(),
            None,
            packed_seq_params=params,
        )[0][kept]
        logits.backward(d_logits.to(logits.dtype))
        return {"logits": logits.detach()} | {
            n: p.grad for n, p in model.named_parameters()
        }

    as_tree = partial(
        of, tokens=tokens, params=tree.params_on("cuda"), kept=apart.tokens
    )
    as_sequences = partial(
        of,
        tokens=tokens[:, apart.source],
        params=thd(apart.documents.lengths, "cuda"),
        kept=apart.kept,
    )
    model = build(torch.bfloat16)
    found = as_tree(model)
    separate = as_sequences(model)
    found, separate = (
        {n: x.double() for n, x in each.items()} for each in (found, separate)
    )
    right = as_sequences(build(torch.float64))
    for name, truth in right.items():
        assert rms(found[name] - truth) <= 2 * rms(separate[name] - truth), name
