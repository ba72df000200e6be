"""A mixer over documents that share prefixes, against the same sequences packed
separately."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megatron_gdn.inference import gdn_rows
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.stages import GatedNorm, SequenceContext
from megatron_gdn.ops.trees import ALIGNMENT_BYTES, TreeDocuments
from tests.inference.row_mixers import gdn_kind
from tests.ops.test_mixer import make_inputs, plain_rule
from tests.parallel import assert_close
from tests.trees import Tree, random_tree, separately

SIZES = HeadSizes(1, 2, 4, 3)


def run(leaves, rows, documents, recompute=False):
    _, weight, bias, A_log, dt_bias, gamma = leaves
    stages = gdn_rows(
        rows,
        weight,
        bias,
        A_log,
        dt_bias,
        SIZES.layout,
        rule=plain_rule(SIZES),
        norm=GatedNorm(gamma),
        recompute_qkv=recompute,
    )
    return mix(rows, stages, SequenceContext(documents))


def both(tree, dtype=torch.float64, recompute=False):
    leaves, _ = make_inputs(SIZES, max(sum(tree.slots), 1), bias=True)
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    apart = separately(tree)
    torch.manual_seed(2)
    d_out = torch.randn(
        len(apart.tokens), 1, SIZES.value_heads * SIZES.value_dim, dtype=dtype
    )
    outs = (
        run(leaves, leaves[0], tree.documents, recompute)[apart.tokens],
        run(leaves, leaves[0][apart.source], apart.documents)[apart.kept],
    )
    return [(out, *torch.autograd.grad(out, leaves, d_out)) for out in outs]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_equals_the_sequences_packed_separately(seed):
    tree = random_tree(seed, multiple=seed % 3 + 1)
    for ours, theirs in zip(*both(tree, recompute=bool(seed % 2)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


def test_a_convolution_of_one_tap_reads_no_row_of_a_parent():
    kind = gdn_kind(SIZES, taps=1)
    tree = Tree((-1, 0, 0), (7, 3, 5))
    apart = separately(tree)
    rows = kind.rows(15, dtype=torch.float64)
    parameters = kind.draw(torch.float64)
    ours = kind.train(rows, parameters, kind.plain, tree.documents)
    theirs = kind.train(rows[apart.source], parameters, kind.plain, apart.documents)
    torch.testing.assert_close(ours[apart.tokens], theirs[apart.kept])


@pytest.mark.parametrize(
    ("dtype", "tolerance", "trees"),
    [
        pytest.param(torch.float32, 1e-4, 60, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1e-4, 500, marks=pytest.mark.nightly),
        pytest.param(torch.float64, 1e-11, 500, marks=pytest.mark.nightly),
    ],
)
def test_many_trees(dtype, tolerance, trees):
    """In fp32 some 400 roundings: parameters' gradients are sums over all tokens, which
    cancel."""
    for seed in range(trees):
        tree = random_tree(seed, multiple=seed % 4 + 1, most=20, longest=20)
        for ours, theirs in zip(
            *both(tree, dtype, recompute=bool(seed % 2)), strict=True
        ):
            assert_close(f"tree {seed}", ours, theirs, tolerance)


@pytest.mark.gpu
def test_a_branch_has_the_same_bits_whatever_its_siblings():
    """Its rows of output and gradient; where the plain rule promises bits, on a GPU."""
    rows, d_out = torch.randn(2, 200, 1, SIZES.layout.width, device="cuda")
    d_out = d_out[..., : SIZES.value_heads * SIZES.value_dim]
    leaves = [
        x if x is None else x.detach().float().cuda() for x in make_inputs(SIZES, 1)[0]
    ]
    found = []
    for siblings in ((), (1,), (50, 0, 3)):
        tree = Tree((-1, *[0] * (1 + len(siblings)), 1), (65, 30, *siblings, 20))
        last = len(tree.lengths) - 1
        T = sum(tree.lengths)
        mine = [*tree.tokens(0), *tree.tokens(1), *tree.tokens(last)]
        x, d = torch.zeros_like(rows[:T]), torch.zeros_like(d_out[:T])
        x[mine], d[mine] = rows[: len(mine)], d_out[: len(mine)]
        documents = replace(tree.documents, device=torch.device("cuda", 0))
        out = run(leaves, x.requires_grad_(), documents)
        (grad,) = torch.autograd.grad(out, x, d)
        found.append((out[mine], grad[mine][65:]))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_shared_prefix_goes_through_the_rule_once():
    """Tokens of the rule's calls in forward and backward: those of the buffer, 6144 of
    36864."""
    seen = []
    rule = plain_rule(SIZES)

    class Watched(type(rule)):
        def begin(self, inputs, documents):
            seen.append(inputs.k.shape[1])
            return super().begin(inputs, documents)

        def begin_backward(self, d_o, inputs, saved, documents):
            seen.append(inputs.k.shape[1])
            return super().begin_backward(d_o, inputs, saved, documents)

    leaves, _ = make_inputs(SIZES, 2048 + 16 * 256)
    tree = Tree((-1, *[0] * 16), (2048, *[256] * 16))
    with patch(f"{__name__}.plain_rule", lambda sizes: Watched()):
        run(leaves, leaves[0], tree.documents).sum().backward()
    assert seen == [2048, 4096, 4096, 2048]


def test_a_rule_gets_tensors_as_aligned_as_whole_ones():
    """fp32 gates of two heads are 8 bytes a token, and the second level begins at an
    odd one."""
    seen = [
        level.rows_of(torch.randn(1, 9, 2))
        for level in Tree((-1, 0), (3, 6)).documents.levels
    ]
    assert [x.shape[1] for x in seen] == [3, 6]
    assert all(x.data_ptr() % ALIGNMENT_BYTES == 0 for x in seen)


def test_rows_of_neighbours_are_not_copied():
    x = torch.randn(1, 9, 4)  # 16 bytes a token
    for level in Tree((-1, 0, 0), (3, 2, 4)).documents.levels:
        rows = level.rows_of(x)
        assert rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_forward_whose_gradient_nobody_asks_for_computes_no_map():
    rule = plain_rule(SIZES)
    calls = []

    class Watched(type(rule)):
        class forward_class(type(rule).forward_class):
            def state_map(self):
                calls.append("map")
                return super().state_map()

    tree = Tree((-1, 0, 1, 1), (3, 2, 4, 1))  # one level has parents and children
    leaves, _ = make_inputs(SIZES, 10)
    with patch(f"{__name__}.plain_rule", lambda sizes: Watched()):
        kept = run(leaves, leaves[0], tree.documents)
        assert calls == ["map"]
        with torch.no_grad():
            assert torch.equal(run(leaves, leaves[0], tree.documents), kept)
    assert calls == ["map"]


@pytest.mark.parametrize(
    "parents, lengths, told",
    [
        ((-1, 1), (3, 3), r"parents\[1\] is 1; a document continues an earlier one"),
        ((-2,), (3,), r"parents\[0\] is -2"),
        ((-1,), (3, 3), "parents has 1 entries; there are 2 documents"),
        ((-1, 0), (3, -1), "backwards|has -1 tokens"),
    ],
)
def test_what_is_no_tree_is_refused(parents, lengths, told):
    with pytest.raises(ValueError, match=told):
        _ = Tree(parents, lengths).documents


def test_padding_of_documents_without_tokens_is_refused():
    documents = TreeDocuments((0, 2, 4), torch.device("cpu"), (-1, 0), (0, 0))
    with pytest.raises(ValueError, match="4 tokens are padding of documents without"):
        _ = documents.levels


def test_tables_are_made_on_the_host_whatever_the_default_device_is():
    """``torch.device("meta")`` stands for a GPU; what comes up there has no values."""
    made = []
    for device in ("cpu", "meta"):
        documents = random_tree(3).documents
        with torch.device(device):
            history = documents.history(3)
            levels = documents.levels
        table = [x for x in vars(history.table).values() if torch.is_tensor(x)]
        made.append([history.row_indices, *table, *(level.parents for level in levels)])
    for here, there in zip(*made, strict=True):
        assert torch.equal(here, there)


def test_rows_of_documents_that_continue_none_are_the_buffers_rows():
    documents = Tree((-1, -1), (3, 2)).documents
    rows = torch.randn(1, sum(documents.lengths), 4)
    assert documents.to_buffer([rows]) is rows
    assert documents.to_buffer([None]) is None
