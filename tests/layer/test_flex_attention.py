"""The mask of flex_attention on a GPU, and what it computes, against the plain twin on
a CPU."""

from functools import partial
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch._dynamo.backends.debugging import aot_eager

from megatron_gdn.context_parallel.layouts import positions
from megatron_gdn.mixers import flex_attention
from megatron_gdn.mixers.attention import TorchAttention
from megatron_gdn.mixers.flex_attention import BLOCK_SIZE, DocumentMask, attend
from megatron_gdn.mixers.packing import resolve_packed_seq_params
from megatron_gdn.ops.documents import Documents
from tests.distributed.layer_laws import thd
from tests.other_defaults import by_both_defaults
from tests.parallel import alone, assert_close, make_config
from tests.trees import Tree, random_tree

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
ANSWERS = Tree((-1, *[0] * 4), (2 * BLOCK_SIZE + 9, 3 * BLOCK_SIZE, 40, 41, BLOCK_SIZE))
# Not in the order of a walk, with empty documents and padding: 2 and 4 continue 0, 5
# continues 4.
MIXED = Tree((-1, -1, 0, 1, 0, 4, 5), (2 * BLOCK_SIZE, 70, 0, 300, 130, 0, 200), 8)
PACKED = Documents((0, *accumulate((3, 0, 2 * BLOCK_SIZE, 129, 1))), CPU)
# Whole blocks, and one token more.
WHOLE, LONGER = (Documents((0, 3 * BLOCK_SIZE + more), CPU) for more in (0, 1))
# each document directly behind what it continues
WALKS = [ANSWERS.documents, PACKED, WHOLE, LONGER]


def seen_by_definition(documents: Documents) -> torch.Tensor:
    """``[S, S]``: its own document up to itself, and the tokens of those that it
    continues."""
    whole = torch.zeros(2 * [documents.total_tokens], dtype=torch.bool)
    for start, end in zip(documents.offsets, documents.offsets[1:], strict=False):
        whole[start:end, start:end] = torch.ones(
            2 * [end - start], dtype=torch.bool
        ).tril()
        for before in documents.ancestor_slices(start) if end > start else ():
            whole[start:end, before] = True
    return whole


def core_of(**changes) -> TorchAttention:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0}
    config = make_config(**{**sizes, **changes})
    return TorchAttention(config, 1, AttnMaskType.causal, "self", pg_collection=alone())


def dense(mask: DocumentMask) -> torch.Tensor:
    queries = len(mask.query_place_s)
    keys = len(mask.key_place_S)
    nothing = torch.zeros(())  # all heads see the same
    return mask.sees(
        nothing, nothing, torch.arange(queries)[:, None], torch.arange(keys)[None]
    )


def listed(mask: DocumentMask, which: int, queries: int, keys: int) -> torch.Tensor:
    """``[I, J]``: the blocks of one of the mask's lists."""
    counts, order = (x[0, 0] for x in mask.block_tables[which : which + 2])
    found = torch.zeros(queries, keys, dtype=torch.bool)
    for row, (count, blocks) in enumerate(zip(counts.tolist(), order, strict=True)):
        found[row, blocks[:count].long()] = True
    return found


@pytest.mark.parametrize("documents", [PACKED, MIXED.documents], ids=["packed", "tree"])
def test_no_number_of_a_mask_follows_torchs_defaults(documents):
    place = torch.arange(documents.total_tokens)[:-3]

    def numbers():
        *of_tokens, tables = DocumentMask.of(documents, place)
        return [*of_tokens, *(x for x in tables if x is not None)]

    for found, expected in zip(*by_both_defaults(numbers), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(
    "documents",
    [
        *WALKS,
        MIXED.documents,
        *(random_tree(i, 3, longest=200).documents for i in range(12)),
    ],
    ids=lambda documents: str(documents.lengths),
)
@pytest.mark.parametrize("size, rank", [(1, 0), (2, 1)])
def test_the_mask_is_that_of_the_definition_token_by_token_and_by_blocks(
    documents, size, rank
):
    S = documents.total_tokens
    # without the last one, if odd
    rows = positions((S - S % size,), size, "contiguous")[rank]
    mask = DocumentMask.of(documents, rows)
    right = seen_by_definition(documents)[rows]
    assert torch.equal(dense(mask), right)
    padded = right.new_zeros(
        -(-len(rows) // BLOCK_SIZE) * BLOCK_SIZE, -(-S // BLOCK_SIZE) * BLOCK_SIZE
    )
    padded[: len(rows), :S] = right
    blocks = (
        padded.unflatten(1, (-1, BLOCK_SIZE))
        .unflatten(0, (-1, BLOCK_SIZE))
        .transpose(1, 2)
    )
    some = blocks.flatten(2).any(2)
    every = blocks.flatten(2).all(2)
    partly, fully = (listed(mask, which, *some.shape) for which in (0, 2))
    assert torch.equal(fully, every)
    assert not (partly & fully).any() and not (some & ~(partly | fully)).any()
    if any(documents is walk for walk in WALKS):  # no block too many
        assert torch.equal(partly, some & ~every)


def test_the_mask_has_no_table_of_queries_times_keys():
    documents = Tree((-1, *[0] * 16), (2048, *[256] * 16)).documents
    mask = DocumentMask.of(documents, torch.arange(6144))
    largest = max(x.numel() for x in (*mask[:3], *mask.block_tables))
    assert largest == 6144


@pytest.fixture
def counted():
    """flex_attention traced as for a GPU, and run by torch operations; a list of its
    graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    flex_attention._compiled_attention.cache_clear()
    in_torch = patch("torch.compile", partial(torch.compile, backend=backend))
    # torch refuses a backward on a CPU, whose kernels have none.
    with (
        in_torch,
        patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
    ):
        yield graphs
    flex_attention._compiled_attention.cache_clear()


@pytest.mark.slow
def test_flex_attention_is_the_plain_twin_and_lengths_do_not_compile_it_again(counted):
    """Outputs and gradients in fp64. The first batch has as many blocks as heads, which
    torch takes for one size."""
    plain = core_of(num_query_groups=2)
    torch.manual_seed(0)
    batches = [
        Tree((-1, 0), (300, 200)),
        ANSWERS,
        thd((100, 500)),
        MIXED,
        thd((260,)),
        Tree((-1, 0), (150, 9)),
    ]
    for seen, batch in enumerate(batches):
        params = batch.params if isinstance(batch, Tree) else batch
        padded = params.cu_seqlens_q_padded
        S = int((params.cu_seqlens_q if padded is None else padded)[-1])
        qkv = [
            torch.randn(S, 1, heads, 16).double().requires_grad_()
            for heads in (4, 2, 2)
        ]
        mask = DocumentMask.of(
            resolve_packed_seq_params(params, S, CPU), torch.arange(S)
        )
        outputs = (
            attend(*qkv, mask, plain._scale).flatten(2),
            plain(*qkv, None, packed_seq_params=params).view(S, 1, 64),
        )
        d_out = torch.randn(S, 1, 64).double()
        both = [(out, *torch.autograd.grad(out, qkv, d_out)) for out in outputs]
        for found, expected in zip(*both, strict=True):
            assert_close(f"micro-batch {seen}", found, expected, 1e-13)
        if seen == 1:
            compiled = len(counted)
    assert len(counted) == compiled


def test_a_branch_has_the_same_bits_whatever_its_siblings():
    """Its rows of output and of the queries' gradient, in the plain twin."""
    core = core_of()
    torch.manual_seed(0)
    mine = [torch.randn(95, 1, 4, 16) for _ in range(3)]
    weight = torch.randn(30, 1, 64)
    found = []
    for siblings in ((), (1,), (50, 0, 3)):
        tree = Tree((-1, *[0] * len(siblings), 0), (65, *siblings, 30))
        rows = [*tree.tokens(0), *tree.tokens(len(siblings) + 1)]
        qkv = [torch.randn(sum(tree.slots), 1, 4, 16) for _ in mine]
        for x, own in zip(qkv, mine, strict=True):
            x[rows] = own
            x.requires_grad_()
        out = core(*qkv, None, packed_seq_params=tree.params)
        (out[rows[65:]] * weight).sum().backward()
        found.append([out.detach()[rows], *(x.grad[rows[65:]] for x in qkv)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


class OnGPU(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    "changes, dtype, size, runs",
    [
        ({"attention_dropout": 0.1}, torch.float32, 16, False),
        ({"batch_invariant_mode": True}, torch.float32, 16, False),
        ({}, torch.float64, 16, False),
        ({}, torch.float32, 8, False),
        ({}, torch.float32, 16, True),
    ],
)
def test_a_gpu_runs_flex_attention_where_it_can_and_a_cpu_its_twin(
    changes, dtype, size, runs
):
    query = torch.zeros(4, 1, 4, size, dtype=dtype)
    core = core_of(**changes)
    assert core._runs_flex(query.as_subclass(OnGPU)) is runs and not core._runs_flex(
        query
    )
