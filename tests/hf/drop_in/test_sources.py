"""Document boundaries from every source, and sources that are refused."""

import pytest
import torch

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel.layouts import positions
from megatron_gdn.hf.drop_in import batch, is_indexed_packed_mask
from megatron_gdn.hf.drop_in.sources import (
    BoundarySources,
    document_ids,
    split_masks,
)
from megatron_gdn.mixers.packing import MicroBatchShare

LENGTHS = (3, 1, 4)
IDS = [[1, 1, 1, 2, 3, 3, 3, 3]]


def block_mask(ids) -> torch.Tensor:
    """``[B, 1, S, S]``, True where a token sees another."""
    ids = torch.tensor(ids)
    same = (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0)
    return (same & torch.ones(ids.shape[1], ids.shape[1]).tril().bool())[:, None]


def read(rows=1, tokens=8, **sources):
    found = document_ids(BoundarySources(**sources), rows, tokens)
    return None if found is None else found.tolist()


def test_which_masks_number_documents():
    assert is_indexed_packed_mask(torch.tensor([[1, 2, 0]]))
    for other in (
        None,
        torch.tensor([[1, 1, 0]]),
        torch.tensor([[True]]),
        torch.tensor([2]),
        torch.full((1, 1, 2, 2), 2),
    ):
        assert not is_indexed_packed_mask(other)


def test_every_source_names_the_same_documents():
    ids = torch.tensor(IDS)
    additive = torch.zeros(1, 1, 8, 8).masked_fill(~block_mask(IDS), torch.finfo().min)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    assert read(attention_mask=ids) == IDS
    assert read(packed_seq_ids=ids) == IDS
    assert read(attention_mask=block_mask(IDS)) == IDS
    assert read(attention_mask=additive) == IDS
    assert read(cu_seqlens=torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)) == IDS
    assert read(position_ids=positions) == IDS
    assert read(position_ids=positions.expand(4, 1, -1)) == IDS
    of_images = torch.zeros(3, 1, 8, dtype=torch.long)
    assert read(position_ids=torch.cat([positions[None], of_images])) == IDS
    assert read(position_ids=positions.expand(3, 1, -1)) == IDS
    assert (
        read(
            packed_seq_ids=ids, cu_seqlens=torch.tensor([0, 3, 4, 8]), position_ids=ids
        )
        == IDS
    )


def test_a_dict_that_lacks_the_mask_of_linear_attentions_gives_them_another():
    """One that has a number for each token."""
    padding = torch.tensor([[1, 1, 0]])
    causal = block_mask([[1, 1, 1]])
    both = {"sliding_attention": causal, "full_attention": padding}
    for masks, expected in (
        (both, padding),
        ({"full_attention": causal}, None),
        ({**both, "linear_attention": causal}, causal),
    ):
        linear, others = split_masks(masks)
        assert linear is expected
        assert others == {k: m for k, m in masks.items() if k != "linear_attention"}


def test_sources_are_read_on_the_host_whatever_the_default_device_is():
    """``torch.device("meta")`` stands for a GPU; what comes up there has no values."""
    ids = torch.tensor(IDS)
    offsets = torch.tensor([0, 3, 4, 8])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    sources = (
        {"attention_mask": ids},
        {"attention_mask": block_mask(IDS)},
        {"packed_seq_ids": ids},
        {"cu_seqlens": offsets},
        {"cu_seqlens": offsets, "indices": torch.arange(8)},
        {"position_ids": positions},
        {"position_ids": positions.expand(3, 1, -1)},
        {"other_masks": {"full_attention": ids}},
        {"other_masks": {"full_attention": block_mask(IDS)}},
    )
    with torch.device("meta"):
        for source in sources:
            assert read(**source) == IDS, source


def test_positions_of_images_start_documents_where_all_three_are_0():
    """Two documents that begin with an image of 2 x 2 tokens, and a document of one
    token."""
    image = [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]
    tables = torch.tensor([table * 2 + [0] for table in image])[:, None]
    assert read(1, 11, position_ids=tables) == [[1] * 5 + [2] * 5 + [3]]
    assert read(1, 5, position_ids=tables[..., :5]) is None
    # a row that begins inside a document
    assert read(1, 10, position_ids=tables[..., 1:]) == [[1] * 4 + [2] * 5 + [3]]
    padding = torch.tensor([[0, 0] + [1] * 5])
    padded = torch.cat([torch.zeros(3, 1, 2).long(), tables[..., :5]], -1)
    assert read(1, 7, position_ids=padded, attention_mask=padding) is None


def test_positions_of_unknown_shapes_are_not_read():
    """Three or four entries are axes of positions in front of ``[B, S]`` alone."""
    for shape in ((3,), (4,), (2, 1, 8), (5, 1, 8), (3, 1, 1, 8), (4, 1, 1, 8)):
        positions = torch.zeros(shape, dtype=torch.long)
        assert read(tokens=shape[-1], position_ids=positions) is None, shape


def test_two_names_of_offsets_must_agree():
    one = torch.tensor([0, 2, 4])
    other = torch.tensor([0, 1, 4])
    told = BoundarySources.from_keywords(
        None, {"cu_seqlens": one, "cu_seq_lens_q": one.clone()}
    )
    assert torch.equal(told.cu_seqlens, one)
    with pytest.raises(ValueError, match="two names of one thing"):
        BoundarySources.from_keywords(None, {"cu_seqlens": one, "cu_seq_lens_q": other})


def test_one_sequence_per_row_is_not_packed():
    straight = torch.arange(8)[None]
    for source in (
        {},
        {"attention_mask": torch.ones(2, 8)},
        {"attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3])},
        {"attention_mask": block_mask([[1] * 8, [1] * 8])},
        {"packed_seq_ids": torch.ones(2, 8)},
        {"cu_seqlens": torch.tensor([0, 8, 16])},
        {"position_ids": straight},
        {"position_ids": straight.expand(2, -1) + 5},
        {"position_ids": straight.expand(3, 2, -1)},
        # What generate() makes of left padding.
        {
            "position_ids": torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5], list(range(8))]),
            "attention_mask": torch.tensor([[0, 0] + [1] * 6, [1] * 8]),
        },
    ):
        assert read(rows=2, **source) is None, source


def test_a_mask_of_other_layers_names_documents_or_padding_or_nothing():
    """Padding only if no mask ``[B, S]`` says where it is."""
    ids = torch.tensor(IDS)
    whole = {"full_attention": torch.ones(1, 8)}
    assert read(attention_mask=ids, other_masks=whole) == IDS
    assert read(attention_mask=torch.ones(1, 8), other_masks=whole) is None
    padded = [[0, 0, 1, 1, 1, 1, 0, 0]]
    masks = {"full_attention": block_mask(padded)}
    assert read(other_masks=masks) == padded
    assert read(attention_mask=torch.tensor(padded), other_masks=masks) is None


def test_rows_without_tokens_have_no_documents():
    assert read(2, 0, cu_seqlens=torch.tensor([0, 0])) is None


def test_positions_that_start_again_count_beside_a_mask_of_ones_and_zeros():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    assert read(position_ids=positions, attention_mask=mask) == [
        [1, 1, 1, 2, 2, 0, 0, 0]
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"packed_seq_ids": torch.ones(1, 7)},
            r"_packed_seq_ids has shape \(1, 7\).*\[1, 8\]",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 3, 7])},
            "ends at 7, which does not match the 8 tokens",
        ),
        (
            {
                "cu_seqlens": torch.tensor([0, 4, 8]),
                "packed_seq_ids": torch.tensor(IDS),
            },
            r"_packed_seq_ids and cu_seq_lens_q put the boundaries .* \[3, 1, 4\] .* \[4, 4\]",
        ),
        (
            {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
            "token 0 of row 0 does not see exactly",
        ),
        (
            {"attention_mask": block_mask(IDS) & ~block_mask(IDS).tril(-2)},
            "token 2 of row 0 does not see exactly",
        ),
        ({"attention_mask": ~block_mask(IDS)}, "token 0 of row 0 does not see exactly"),
        ({"attention_mask": block_mask(IDS).float()}, r"is added to scores.* has 1\.0"),
        (
            {"attention_mask": -block_mask(IDS).float()},
            r"is added to scores.* has -1\.0",
        ),
        (
            {"attention_mask": block_mask(IDS).expand(1, 2, 8, 8)},
            r"must be \[1, 1, 8, 8\]",
        ),
        ({"attention_mask": torch.arange(8)}, r"attention_mask has shape \(8,\)"),
        (
            {
                "attention_mask": block_mask([[1] * 8]),
                "cu_seqlens": torch.tensor([0, 3, 4, 8]),
            },
            r"\(4-D\) and cu_seq_lens_q put the boundaries",
        ),
        (
            {
                "attention_mask": block_mask([[1] * 8]),
                "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
            },
            r"\(4-D\) and position_ids put the boundaries",
        ),
        ({"attention_mask": torch.ones(1, 1, 4, 8)}, "4-D attention_mask of shape"),
        (
            {"position_ids": torch.zeros(1, 5, dtype=torch.long)},
            "position_ids has shape",
        ),
        (
            {"attention_mask": block_mask(IDS * 3)},
            r"4-D attention_mask of shape \(3, 1, 8, 8\) does not fit 1 rows",
        ),
        (
            {"other_masks": {"full_attention": block_mask(IDS * 3)}},
            r"4-D attention_mask of shape \(3, 1, 8, 8\) does not fit 1 rows",
        ),
        (
            {
                "tokens": 10,
                "packed_seq_ids": torch.ones(1, 10),
                "cu_seqlens": torch.arange(11),
            },
            r"documents of \[10\] tokens and .* of \[1, 1, 1, 1, 1, 1, 1, 1\] \.\.\. tok",
        ),
    ],
)
def test_what_does_not_fit_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        read(**source)


TWO_ROWS = [[1, 1, 2, 2, 2, 0, 0, 0], [0, 1, 1, 1, 1, 0, 3, 3]]
KEPT = {
    "cu_seqlens": torch.tensor([0, 2, 5, 9, 11]),
    "indices": torch.tensor([0, 1, 2, 3, 4, 9, 10, 11, 12, 14, 15]),
}


def test_indices_say_which_tokens_offsets_count():
    mask = torch.tensor(TWO_ROWS)
    expected = [[1, 1, 2, 2, 2, 0, 0, 0], [0, 3, 3, 3, 3, 0, 4, 4]]
    assert (
        read(rows=2, **KEPT)
        == read(rows=2, **KEPT, attention_mask=mask > 0)
        == expected
    )
    assert read(rows=2, **KEPT, attention_mask=mask) == TWO_ROWS
    blocks = [[1, 1, 2, 2, 2, 0, 0, 0], [0, 1, 1, 1, 1, 0, 2, 2]]
    assert read(rows=2, **KEPT, attention_mask=block_mask(TWO_ROWS)) == blocks


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"attention_mask": torch.tensor([[1, 2, 2, 2, 2, 0, 0, 0], TWO_ROWS[1]])},
            "boundaries",
        ),
        (
            {"attention_mask": torch.ones(2, 8)},
            "keeps 16 tokens, which are not the 11 of indices",
        ),
        ({"cu_seqlens": None}, "indices of 11 tokens without cu_seqlens"),
        (
            {"cu_seqlens": torch.tensor([0, 2, 16])},
            "ends at 16, which does not match the 11",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 2, 6, 9, 11])},
            "goes on from one row of 8 tokens",
        ),
        (
            {"indices": KEPT["indices"].flip(0)},
            r"indices of shape \(11,\) must be \[T\]",
        ),
        (
            {"indices": KEPT["indices"][None]},
            r"indices of shape \(1, 11\) must be \[T\]",
        ),
        ({"indices": KEPT["indices"] + 1}, "to at most 15"),
        ({"indices": KEPT["indices"] - 1}, "increase from 0"),
        (
            {"cu_seqlens": torch.tensor([0, 5, 16]), "indices": None},
            "goes on from one row of 8",
        ),
    ],
)
def test_indices_that_contradict_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        read(rows=2, **{**KEPT, **source})


@pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
def test_places_of_tokens_give_the_layout_and_what_it_cuts(layout, monkeypatch):
    """Of two ranks that hold two documents."""
    layout = SequenceLayout(layout)
    cut = (8, 16) if layout is SequenceLayout.ZIGZAG else (24,)
    places = positions(cut, 2, layout)
    monkeypatch.setattr(batch, "_gather_to_host", lambda index, share: places)
    sources = BoundarySources(cu_seqlens=torch.tensor([0, 8, 24]), seq_index=places[0])
    cpu = torch.device("cpu")
    share = MicroBatchShare(None, None, 2, 0, SequenceLayout.ZIGZAG, (24,), cpu)
    found = batch._with_sequence_layout(sources, 1, share)
    assert (found.layout, tuple(found.lengths)) == (layout, cut)


@pytest.mark.parametrize(
    ("option", "rows", "offsets", "expected"),
    [
        ("contiguous", 1, None, ("contiguous", (24,))),
        ("contiguous", 1, [0, 8, 24], ("contiguous", (24,))),
        ("zigzag", 1, [0, 8, 24], ("zigzag", (8, 16))),
        ("zigzag", 1, None, ("zigzag_buffer", (24,))),
        ("zigzag", 2, [0, 24, 48], ("zigzag_buffer", (24,))),
    ],
)
def test_without_places_the_options_layout_cuts_documents_of_one_row_by_their_offsets(
    option, rows, offsets, expected
):
    sources = BoundarySources(
        cu_seqlens=None if offsets is None else torch.tensor(offsets)
    )
    share = MicroBatchShare(
        None, None, 2, 0, SequenceLayout(option), (24,), torch.device("cpu")
    )
    found = batch._with_sequence_layout(sources, rows, share)
    assert (found.layout, tuple(found.lengths)) == expected
