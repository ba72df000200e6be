"""Padded batches to packed rows and back, against loops over the mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_gdn
from megatron_gdn import pack_rows, seqlens_of_mask, unpack_rows, unpad_data
from tests.searches import examples

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 2, 2]])


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        ([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]], (2, 3, 1, 2, 3)),
        # documents end with their row, whatever the next id
        ([[1, 1], [1, 1], [2, 2]], (2, 2, 2)),
        ([[0, 1, 1, 0, 3]], (2, 1)),  # padding in front and between, an id left out
        ([[0, 0], [0, 1]], (1,)),
        ([[0, 0]], ()),
        ([[], []], ()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_lengths_are_counted_row_by_row(mask, lengths, dtype):
    assert seqlens_of_mask(torch.tensor(mask, dtype=dtype)) == lengths


def test_tokens_boundaries_and_longest_document():
    indices, cu_seqlens, longest = unpad_data(
        torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    )
    assert (
        indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9] and indices.dtype == torch.int64
    )
    assert cu_seqlens.tolist() == [0, 2, 5, 9] and cu_seqlens.dtype == torch.int32
    assert longest == 4 and type(longest) is int
    indices, cu_seqlens, longest = unpad_data(torch.zeros(2, 3, dtype=torch.int64))
    assert (indices.tolist(), cu_seqlens.tolist(), longest) == ([], [0], 0)


def test_documents_lie_end_to_end_in_slots():
    tokens_SB = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]]).T
    packed, params = pack_rows(tokens_SB, MASK)
    assert packed.tolist() == [[10], [11], [12], [20], [21], [22], [23]]
    assert (
        params.qkv_format == "thd" and params.max_seqlen_q == params.max_seqlen_kv == 3
    )
    for cu_seqlens in (params.cu_seqlens_q, params.cu_seqlens_kv):
        assert cu_seqlens.tolist() == [0, 3, 5, 7] and cu_seqlens.dtype == torch.int32
    assert params.cu_seqlens_q_padded is None and params.cu_seqlens_kv_padded is None

    packed, params = pack_rows(tokens_SB, MASK, multiple_of=4)
    assert packed.flatten().tolist() == [10, 11, 12, 0, 20, 21, 0, 0, 22, 23, 0, 0]
    assert params.max_seqlen_q == params.max_seqlen_kv == 4
    for cu_seqlens in (params.cu_seqlens_q, params.cu_seqlens_kv):
        assert cu_seqlens.tolist() == [0, 3, 5, 7]
    for cu_seqlens in (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded):
        assert cu_seqlens.tolist() == [0, 4, 8, 12] and cu_seqlens.dtype == torch.int32


@st.composite
def masks(draw):
    """Rows of documents with ids that grow, padding around them, and none in one."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = []
        last = 0
        for length, pad, step in draw(
            st.lists(
                st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(1, 2)),
                max_size=3,
            )
        ):
            last += step
            row += [0] * pad + [last] * length
        rows.append(row)
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    return torch.tensor(
        [row + [0] * (width - len(row)) for row in rows], dtype=torch.int64
    )


def packed_by_a_loop(x_SBD, mask, multiple_of):
    rows = []
    real = [0]
    padded = [0]
    for b, ids in enumerate(mask):
        for document in ids[ids > 0].unique():
            here = (ids == document).nonzero().flatten()
            slot = -(-len(here) // multiple_of) * multiple_of
            rows += [x_SBD[here, b], x_SBD.new_zeros(slot - len(here), x_SBD.shape[2])]
            real.append(real[-1] + len(here))
            padded.append(padded[-1] + slot)
    return torch.cat([x_SBD[:0, 0], *rows])[:, None], real, padded


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(masks(), st.integers(1, 6))
def test_packing_is_what_a_loop_does_and_unpacking_is_its_inverse(mask, multiple_of):
    keep_SB = (mask > 0).T
    x = torch.randn(*keep_SB.shape, 3)
    x[~keep_SB] = torch.nan
    x.requires_grad_()
    packed, params = pack_rows(x, mask, multiple_of=multiple_of)
    expected, real, padded = packed_by_a_loop(x.detach(), mask, multiple_of)
    assert torch.equal(packed, expected)
    assert params.cu_seqlens_q.tolist() == (real if len(real) > 1 else [0, 0])
    slots = params.cu_seqlens_q if multiple_of == 1 else params.cu_seqlens_q_padded
    assert slots.tolist() == (padded if len(padded) > 1 else [0, 0])

    back = unpack_rows(packed, mask, multiple_of=multiple_of)
    assert torch.equal(back, x.detach().where(keep_SB[..., None], 0.0))
    weight = torch.randn_like(back)
    # as where a loss divides by the number of padding's tokens
    weight[~keep_SB] = torch.nan
    (gradient,) = torch.autograd.grad(back, x, weight)
    assert torch.equal(gradient, weight.where(keep_SB[..., None], 0.0))


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_both_directions_have_the_derivatives_of_a_gather(multiple_of):
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    packed = pack_rows(x.detach(), MASK, multiple_of=multiple_of)[0].requires_grad_()

    def pack(x):
        return pack_rows(x, MASK, multiple_of=multiple_of)[0]

    def unpack(packed):
        return unpack_rows(packed, MASK, multiple_of=multiple_of)

    for function, argument in ((pack, x), (unpack, packed)):
        assert torch.autograd.gradcheck(function, argument)
        assert torch.autograd.gradgradcheck(function, argument)


def test_tables_do_not_follow_the_default_device():
    x = torch.randn(4, 2, 3)
    with torch.device("meta"):  # stands for a GPU; what comes up there has no values
        packed, params = pack_rows(x, MASK, multiple_of=4)
        back = unpack_rows(packed, MASK, multiple_of=4)
        assert (
            unpad_data(MASK)[1].tolist() == params.cu_seqlens_q.tolist() == [0, 3, 5, 7]
        )
    assert torch.equal(back, x * (MASK > 0).T[..., None])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1], [2, 2, 1]], "row 1 .* document 1 after document 2, at position 2"),
        ([[1, 2, 1]], "document 1 after document 2, at position 2"),
        ([[1, 0, 1]], "goes on with document 1 after padding inside it, at position 2"),
        ([[1, -1]], "holds -1"),
        ([1, 1], r"integers \[B, S\].* shape \(2,\)"),
        ([[[1]]], "integers"),
        ([[1.0]], "float32"),
        ([[1j]], "complex64"),
        ([[True]], "bool mask may mean tokens or padding"),
    ],
)
def test_what_would_be_reordered_or_guessed_is_refused(mask, message):
    mask = torch.tensor(mask)
    for count in (seqlens_of_mask, unpad_data):
        with pytest.raises(ValueError, match=message):
            count(mask)
    for change in (pack_rows, unpack_rows):
        with pytest.raises(ValueError):
            change(torch.zeros(*mask.shape[::-1], 1), mask)


def test_shapes_that_do_not_fit_are_refused():
    x = torch.zeros(4, 2, 3)
    with pytest.raises(ValueError, match="sequence first"):
        pack_rows(x.transpose(0, 1), MASK)
    with pytest.raises(ValueError, match="multiple_of=0"):
        pack_rows(x, MASK, multiple_of=0)
    packed, _ = pack_rows(x, MASK, multiple_of=4)
    with pytest.raises(ValueError, match=r"\[7, 1, ...\] with multiple_of=1"):
        unpack_rows(packed, MASK)
    with pytest.raises(ValueError, match="the rows of all ranks"):
        unpack_rows(packed[:6], MASK, multiple_of=4)
    assert {"pack_rows", "unpack_rows"} <= set(megatron_gdn.__all__)


@pytest.mark.parametrize(
    ("mask", "what"),
    [
        ([[1, 1, 0]], "a list"),
        (torch.ones(1, 3, dtype=torch.int, device="meta"), "meta device"),
    ],
)
def test_what_holds_no_ids_is_refused(mask, what):
    with pytest.raises(ValueError, match=f"tensor of integers.*{what}"):
        pack_rows(torch.zeros(3, 1, 2), mask)


def test_a_mask_made_in_inference_mode_packs_for_training():
    with torch.inference_mode():
        mask = torch.tensor([[1, 1, 0], [1, 2, 2]])
    x = torch.randn(3, 2, 2, requires_grad=True)
    packed, params = pack_rows(x, mask)
    unpack_rows(packed * 2, mask).sum().backward()
    assert params.cu_seqlens_q.tolist() == [0, 2, 3, 5]
    assert torch.equal(x.grad[..., 0], 2.0 * (mask.T > 0))
