"""Documents that share prefixes, in parallel, equal the sequences packed separately on
one rank."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron_gdn import pack_groups, pack_tree
from megatron_gdn.context_parallel import local_indices
from tests.distributed.gpt_laws import FULL_RECOMPUTE, build_model, summed_gradients
from tests.distributed.layer_laws import thd
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN, GDN2, GDP, KDA, KDA_FULL, MAMBA2
from tests.parallel import (
    VOCABULARY,
    assert_close,
    hybrid_model,
    model_config,
    parallel,
)
from tests.trees import random_tree

each = pytest.mark.parametrize(
    "mixers",
    [GDN, GDN2, GDP, MAMBA2, KDA, KDA_FULL],
    ids=["gdn", "gdn2", "gdp", "mamba2", "kda", "kda_full"],
)


def prompts_and_responses() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    torch.manual_seed(11)
    prompts = [torch.randint(VOCABULARY, (n,)) for n in (1, 9, 20)]
    responses = [
        [torch.randint(VOCABULARY, (n,)) for n in lengths]
        for lengths in ((5, 2), (1, 0, 12, 7), (3,))
    ]
    return prompts, responses


build = partial(build_model, layers=(1, 0, 1), positions="rope")


def build_hybrid(cp: int, recompute: bool):
    """16 layers in fp64, 12 of Gated DeltaNet and 4 of attention, each with an MLP."""
    pattern = 4 * "G-G-G-*-"
    sizes = {"num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False}
    config = model_config(
        pattern,
        context_parallel_size=cp,
        init_method_std=0.1,
        **sizes,
        **(FULL_RECOMPUTE if recompute else {}),
    )
    torch.manual_seed(3)
    return hybrid_model(config, pattern, position_embedding_type="rope").double()


def losses(model, tokens, position_ids, labels, params, held) -> torch.Tensor:
    """``[T]``, 0 at the tokens of other ranks; torch's, as Megatron's takes fp32 of the
    logits."""
    logits = model(
        tokens[:, held], position_ids[:, held], None, packed_seq_params=params
    )
    mine = F.cross_entropy(logits[0], labels[0, held], reduction="none")
    return mine.new_zeros(tokens.shape[1]).index_copy(0, held, mine)


def of_weighted(model, rows) -> dict[str, torch.Tensor]:
    rows = torch.cat(rows)
    loss = (rows * torch.arange(1, len(rows) + 1)).sum()
    return summed_gradients(model, loss, losses=rows.detach())


def as_tree(cp: int = 1, recompute: bool = False) -> dict[str, torch.Tensor]:
    """The losses of all responses' tokens, and every parameter's gradient of a weighted
    sum."""
    with parallel(cp=cp):
        model = build(cp, recompute)
        rank = parallel_state.get_context_parallel_rank()
        packed = pack_tree(*prompts_and_responses(), multiple_of=2 * cp)
        slots = tuple(packed.packed_seq_params.cu_seqlens_q_padded.diff().tolist())
        held = local_indices(slots, cp, rank)
        found = losses(model, *packed[:3], packed.packed_seq_params, held)
        assert torch.equal(packed.loss_mask.sum(), torch.tensor(30.0))
        rows = [row for rows in packed.unpack(found[None]) for row in rows]
        return of_weighted(model, rows)


def as_groups(most_tokens: int) -> dict[str, torch.Tensor]:
    """The same by the model of 16 layers, in micro-batches of at most so many
    tokens."""
    with parallel():
        model = build_hybrid(1, False)
        prompts, responses = prompts_and_responses()
        groups = [
            (p.tolist(), [x.tolist() for x in each])
            for p, each in zip(prompts, responses, strict=True)
        ]
        packed = pack_groups(groups, most_tokens, device="cpu")
        found = []
        for each in packed.micro_batches:
            assert each.tokens.shape[1] <= most_tokens
            every = torch.arange(each.tokens.shape[1])
            found.append(losses(model, *each[:3], each.packed_seq_params, every)[None])
        of_responses = packed.unpack(found)
        assert [len(each) for each in of_responses] == [len(each) for each in responses]
        return of_weighted(model, [row for rows in of_responses for row in rows])


def separately(build=build) -> dict[str, torch.Tensor]:
    """The same on one rank, with every response behind a prompt of its own."""
    with parallel():
        model = build(1, False)
        pairs = [
            (p, r)
            for p, each in zip(*prompts_and_responses(), strict=True)
            for r in each
        ]
        whole = [torch.cat(pair) for pair in pairs]
        lengths = tuple(len(x) - 1 for x in whole)
        tokens, labels = (
            torch.cat([x[part] for x in whole])[None]
            for part in (slice(None, -1), slice(1, None))
        )
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        every = torch.arange(tokens.shape[1])
        found = losses(model, tokens, positions, labels, thd(lengths), every).split(
            lengths
        )
        rows = [x[len(p) - 1 :] for x, (p, _) in zip(found, pairs, strict=True)]
        return of_weighted(model, rows)


@pytest.mark.each_value
@each
@pytest.mark.parametrize("seed", [0, 6, 9])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_headwise_equals_one_rank(pools, layout, seed, mixers):
    tree = random_tree(seed, multiple=4)
    pools(2).run(parallel_equals_one_rank, mixers, 1, 2, tree=tree, layout=layout)


@pytest.mark.slow
@each
def test_headwise_over_four_ranks_equals_one_rank(pools, mixers):
    tree = random_tree(3, multiple=8)
    pools(4).run(parallel_equals_one_rank, mixers, 1, 4, tree=tree, mode="headwise")


@pytest.mark.each_value
@each
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_tensor_and_sequence_parallel_equal_one_rank(pools, sequence_parallel, mixers):
    tree = random_tree(4, multiple=2)
    pools(2).run(parallel_equals_one_rank, mixers, 2, 1, sequence_parallel, tree=tree)


@pytest.mark.parametrize("recompute", ["light", "full"])
def test_recomputing_equals_one_rank(pools, recompute):
    tree = random_tree(5, multiple=4)
    pools(2).run(parallel_equals_one_rank, GDN, 1, 2, tree=tree, recompute=recompute)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "cp, recompute", [(1, False), (1, True), (2, False), (2, True)]
)
def test_a_model_on_shared_prompts_equals_separate_sequences(pools, cp, recompute):
    """fp64: losses of every response's token and every parameter's gradient."""
    pool = pools(2)
    apart = pool.run(separately)[0]
    shared = pool.run(as_tree, cp, recompute)[0]
    assert shared.keys() == apart.keys()
    for name, value in shared.items():
        assert_close(name, value, apart[name], 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("most_tokens", [40, 64, 35])
def test_a_hybrid_of_16_layers_on_groups_equals_separate_sequences(pools, most_tokens):
    """fp64, groups together, one group per micro-batch, and one that is cut in two."""
    pool = pools(1)
    apart = pool.run(separately, build_hybrid)[0]
    shared = pool.run(as_groups, most_tokens)[0]
    assert shared.keys() == apart.keys() and len(shared) > 16 * 4
    for name, value in shared.items():
        assert_close(name, value, apart[name], 1e-11)


@each
def test_chunkwise_is_refused_in_words(pools, mixers):
    pools(2).run(refuses_chunkwise, mixers)


def refuses_chunkwise(mixers) -> None:
    tree = random_tree(0, multiple=4)
    said = "documents that continue others run on whole sequences"
    with pytest.raises(NotImplementedError, match=said):
        parallel_equals_one_rank(mixers, 1, 2, tree=tree, mode="chunkwise")
