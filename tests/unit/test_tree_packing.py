"""`tree_packed_seq_params` and `pack_tree`: what layers are given, and what they refuse."""

import copy
import dataclasses

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn import pack_tree, tree_packed_seq_params
from megatron_gdn.mixers.packing import TREE, resolve_packed_seq_params
from megatron_gdn.ops.trees import TreeDocuments

CPU = torch.device("cpu")
PROMPTS = [torch.tensor([7, 8, 9]), torch.tensor([5])]
RESPONSES = [[torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4, 6])]]


def test_prompts_and_responses_are_laid_out():
    packed = pack_tree(PROMPTS, RESPONSES, multiple_of=2)
    # [7 8] -> [9 1] and [9 .]; [] -> [5 4]
    assert packed.tokens.tolist() == [[7, 8, 9, 1, 9, 0, 5, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 0, 1]]
    assert packed.labels.tolist() == [[8, 9, 1, 2, 3, 0, 4, 6]]
    assert packed.loss_mask.tolist() == [[0, 0, 1, 1, 1, 0, 1, 1]]
    params = packed.packed_seq_params
    assert params.cu_seqlens_q.tolist() == [0, 2, 4, 5, 5, 7]
    assert params.cu_seqlens_q_padded.tolist() == [0, 2, 4, 6, 6, 8]
    assert params.max_seqlen_q == 4
    documents = resolve_packed_seq_params(params, 8, CPU)
    assert isinstance(documents, TreeDocuments)
    assert documents.parents == (-1, 0, 0, -1, 3)
    assert documents.position_in_sequence_T.tolist() == [0, 1, 2, 3, 2, 3, 0, 1]
    rows = packed.unpack(packed.labels)
    assert [[x.tolist() for x in each] for each in rows] == [[[1, 2], [3]], [[4, 6]]]


@pytest.mark.parametrize(
    "prompts, responses, told",
    [
        ([], [], "at least one prompt"),
        (PROMPTS, RESPONSES[:1], "2 prompts and 1 lists of responses"),
        ([torch.tensor([], dtype=torch.int64)], [[]], "prompt 0 has no token"),
        ([torch.ones(2)], [[]], r"dtype torch.float32; they must be integers \[n\]"),
    ],
)
def test_other_prompts_are_refused(prompts, responses, told):
    with pytest.raises(ValueError, match=told):
        pack_tree(prompts, responses)


def test_rows_of_another_buffer_are_refused():
    with pytest.raises(ValueError, match="do not fit a buffer of"):
        pack_tree(PROMPTS, RESPONSES).unpack(torch.zeros(1, 3))


def test_parents_are_never_lost_in_silence():
    params = tree_packed_seq_params([3, 2], [-1, 0], device="cpu")
    assert resolve_packed_seq_params(copy.copy(params), 5, CPU).parents == (-1, 0)
    without = dataclasses.replace(params)
    separate = copy.copy(params)
    separate.qkv_format = "thd"
    other = PackedSeqParams(qkv_format=TREE, cu_seqlens_q=params.cu_seqlens_q)
    for changed in (without, separate, other):
        with pytest.raises(ValueError, match="come from megatron_gdn.tree_packed_seq_params"):
            resolve_packed_seq_params(changed, 5, CPU)


def test_ranks_and_recomputation_compare_the_parents():
    chain, fork = (
        resolve_packed_seq_params(tree_packed_seq_params([3, 2, 1], parents, device="cpu"), 6, CPU)
        for parents in ([-1, 0, 1], [-1, 0, 0])
    )
    assert chain.contents != fork.contents
    with pytest.raises(RuntimeError, match="changed between a forward and its recomputation"):
        chain.require_unchanged(chain.stamp, fork.stamp)
