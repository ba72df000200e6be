import pytest
import torch

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.arguments import require_causal


def causal(rows, columns):
    return (torch.arange(columns) > torch.as_tensor(rows)[:, None])[None, None]


def check(mask, rows=1, tokens=8, positions=range(8)):
    require_causal(mask, rows, tokens, lambda: positions)


def test_causal_masks_pass_whole_and_as_a_context_parallel_share():
    check(None)
    check(causal(range(8), 8))
    check(causal(range(8), 8), rows=3)
    check(causal(range(8), 8).expand(3, 1, 8, 8), rows=3)
    mine = local_indices([8], 2, 1)
    check(causal(mine, 8), positions=mine)
    check(torch.ones(2, 8), rows=2)
    check(torch.ones(2, 4), rows=2, positions=mine)


def test_a_bool_mask_that_forbids_everything_stands_for_none():
    """What Megatron's own tests pass; as 0 and 1 or as numbers to add it may mean
    another thing."""
    check(torch.ones(1, 1, 8, 8, dtype=torch.bool))
    check(torch.ones(3, 1, 8, 8, dtype=torch.bool), rows=3)
    check(torch.ones(1, 1, 4, 8, dtype=torch.bool), positions=local_indices([8], 2, 1))
    almost = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    almost[..., 0, 0] = False
    for mask in (
        torch.ones(1, 1, 8, 8),
        torch.ones(1, 1, 8, 8, dtype=torch.int64),
        almost,
    ):
        with pytest.raises(NotImplementedError, match="not a causal mask"):
            check(mask)


def test_a_mask_of_another_cut_over_ranks_is_told_from_one_that_is_not_causal():
    zigzag = local_indices([8], 2, 0)
    said = "of this rank's tokens, .* lie at 0 to 3.*'auto'"
    with pytest.raises(NotImplementedError, match=said):
        check(causal(zigzag, 8), positions=range(4))
    with pytest.raises(NotImplementedError, match="is not a causal mask"):
        check(~causal(zigzag, 8), positions=range(4))


def test_a_mask_is_read_once():
    def positions():
        return pytest.fail("read again")

    mask = causal(range(8), 8)
    check(mask)
    require_causal(mask, 1, 8, positions)
    mask[0, 0, 3, 1] = True
    with pytest.raises(NotImplementedError):
        check(mask)


def test_a_mask_is_read_again_for_a_batch_of_another_shape():
    mask = torch.ones(2, 8)
    check(mask, rows=2)
    with pytest.raises(NotImplementedError, match="does not fit 3 rows of 8 tokens"):
        check(mask, rows=3)


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8, 8)], ids=["2-D", "4-D"])
def test_a_mask_made_in_inference_mode_is_read_every_time(shape):
    """Its writes are not counted, so a mark on it would not tell that it was written
    to."""
    with torch.inference_mode():
        mask = torch.ones(shape) if len(shape) == 2 else causal(range(8), 8)
    for _ in range(2):
        check(mask)
    with torch.inference_mode():
        mask[..., 3] = 0 if len(shape) == 2 else True
    with pytest.raises(NotImplementedError, match="is not a causal mask"):
        check(mask)


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
    ],
    ids=["documents", "bidirectional", "inverted", "padding", "additive"],
)
def test_other_masks_are_refused_with_the_way_to_pack(mask):
    with pytest.raises(
        NotImplementedError, match="not a causal mask.*packed_seq_params"
    ):
        check(mask)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 6),
        torch.ones(3, 8),
        torch.ones(8, 1),
        causal(range(4), 8),
        causal(range(8), 4),
        causal(range(8), 12),
        causal(range(8), 8).expand(3, 1, 8, 8),
        causal(range(8), 8)[0],
    ],
    ids=lambda mask: "x".join(map(str, mask.shape)),
)
def test_masks_of_another_shape_are_refused_and_told_the_right_one(mask):
    with pytest.raises(
        NotImplementedError, match=r"must be \[1 or 1, 1, 8, 8\].*or \[1, 8\] of"
    ):
        check(mask)


def test_what_holds_no_mask_is_refused():
    with pytest.raises(TypeError, match="attention_mask is a list"):
        check([[1] * 8])
    with pytest.raises(NotImplementedError, match="meta device"):
        check(torch.ones(1, 8, device="meta"))
