"""The order of mcore-bridge's rows, which its own loader gives to each tensor-parallel rank."""

import pytest
import torch

from megatron_gdn.frameworks.mcore_bridge import by_key_head
from megatron_gdn.ops.delta_rule.base import HeadSizes


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_ranks_share_of_their_rows_reordered_is_its_share_of_ours(tp, conv):
    whole = HeadSizes(4, 8, 3, 5).layout
    widths = whole.conv_widths if conv else whole.widths
    theirs = by_key_head(whole, conv=conv).chunk(tp)
    ours = [each.chunk(tp) for each in torch.arange(sum(widths)).split(widths)]
    back = by_key_head(whole.share(tp), conv=conv).argsort()
    for rank in range(tp):
        assert torch.equal(theirs[rank][back], torch.cat([each[rank] for each in ours]))


def test_the_rows_of_a_key_head_lie_together():
    assert by_key_head(HeadSizes(2, 4, 1, 1).layout).tolist() == [
        0, 2, 4, 5, 8, 9, 12, 13, 16, 17,
        1, 3, 6, 7, 10, 11, 14, 15, 18, 19,
    ]  # fmt: skip
