import pytest
import torch

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.forward_arguments import require_causal


def causal(rows, columns):
    return (torch.arange(columns) > torch.as_tensor(rows)[:, None])[None, None]


def test_causal_masks_pass_whole_and_as_a_context_parallel_share():
    require_causal(None, lambda: range(8))
    require_causal(causal(range(8), 8), lambda: range(8))
    require_causal(causal(range(8), 8).expand(3, 1, 8, 8), lambda: range(8))
    mine = local_indices([8], 2, 1)
    require_causal(causal(mine, 8), lambda: mine)
    require_causal(torch.ones(2, 8), lambda: range(8))


def test_a_mask_is_read_once():
    mask = causal(range(8), 8)
    require_causal(mask, lambda: range(8))
    require_causal(mask, lambda: pytest.fail("read again"))
    mask[0, 0, 3, 1] = True
    with pytest.raises(NotImplementedError):
        require_causal(mask, lambda: range(8))


documents = causal(range(8), 8).clone()
documents[..., 4:, :4] = True


@pytest.mark.parametrize(
    "mask",
    [
        documents,
        torch.zeros(1, 1, 8, 8, dtype=torch.bool),
        ~causal(range(8), 8),
        torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]),
        torch.zeros(1, 1, 8, 8),
        causal(range(4), 8),
    ],
    ids=["documents", "bidirectional", "inverted", "padding", "additive", "wrong rows"],
)
def test_other_masks_are_refused_with_the_way_to_pack(mask):
    with pytest.raises(NotImplementedError, match="not a causal mask.*packed_seq_params"):
        require_causal(mask, lambda: range(8))
