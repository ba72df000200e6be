"""Maps of states side by side in one tensor, as they travel between ranks."""

import pytest
import torch

from megatron_gdn.context_parallel.chunkwise.map_exchange import pack


def test_the_two_parts_of_one_tensor_are_not_copied():
    whole = torch.randn(2, 3, 4, 9)
    local, through = whole.split([5, 4], dim=-1)
    packed = pack(local, through)
    assert torch.equal(packed, whole) and packed.data_ptr() == whole.data_ptr()
    assert packed.is_contiguous()


@pytest.mark.parametrize(
    "split",
    [
        lambda x: (x[..., :5].contiguous(), x[..., 5:].contiguous()),
        lambda x: (x[..., 5:], x[..., :5]),
        lambda x: (x[..., :5], x[..., 5:].mT),
        lambda x: (x[..., :4], x[..., 5:]),
        lambda x: (x[..., :5], (x + 1)[..., 5:]),
        lambda x: (x[:1, ..., :5], x[1:, ..., 5:]),
        lambda x: (x.transpose(0, 1)[..., :5], x.transpose(0, 1)[..., 5:]),
    ],
    ids=["apart", "reversed", "transposed", "gap", "other tensor", "other rows", "other order"],
)
def test_whatever_else_they_are_the_result_is_theirs(split):
    local, through = split(torch.randn(2, 3, 4, 9))
    packed = pack(local, through)
    assert torch.equal(packed, torch.cat([local, through], dim=-1)) and packed.is_contiguous()
