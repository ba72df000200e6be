"""A mixer over documents that share prefixes, against the same sequences packed separately."""

import pytest
import torch

from megatron_gdn.ops.gdn.parts import gdn_parts
from megatron_gdn.ops.gdn.sizes import HeadSizes
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.neighbours import Neighbours
from megatron_gdn.ops.parts import GatedNorm
from tests.ops.test_mixer import make_inputs, plain_rule
from tests.trees import random_tree, separately

SIZES = HeadSizes(1, 2, 4, 3)


def run(leaves, rows, documents, recompute=False):
    _, weight, bias, A_log, dt_bias, gamma = leaves
    parts = gdn_parts(
        rows, weight, bias, A_log, dt_bias, SIZES,
        rule=plain_rule(SIZES), norm=GatedNorm(gamma), recompute_qkv=recompute,
    )  # fmt: skip
    return mix(rows, parts, Neighbours(documents))


def both(tree, dtype=torch.float64, recompute=False):
    """Output and gradients of the tree's tokens, packed as a tree and separately."""
    leaves, _ = make_inputs(SIZES, max(sum(tree.slots), 1), bias=True)
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    apart = separately(tree)
    torch.manual_seed(2)
    d_out = torch.randn(len(apart.tokens), 1, SIZES.value_heads * SIZES.value_dim, dtype=dtype)
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
