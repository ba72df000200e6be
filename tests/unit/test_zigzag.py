"""Index laws of the sequence layouts, for all lengths and sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import inverse, local_indices, rank_order_of_sequence
from megatron_gdn.ops.layout import SizeError
from tests.searches import examples

cp_sizes = st.integers(1, 5) | st.just(8)
units = st.lists(st.integers(0, 4), min_size=1, max_size=6)


def zigzag_by_definition(lengths, cp, rank):
    """Rank r holds chunks r and 2 cp - 1 - r of every sequence."""
    held = []
    start = 0
    for length in lengths:
        tokens = torch.arange(start, start + length)
        chunks = tokens.chunk(2 * cp) if length else [tokens] * 2 * cp
        held += [chunks[rank], chunks[2 * cp - 1 - rank]]
        start += length
    return torch.cat(held)


@settings(deadline=None, max_examples=examples(100))
@given(cp=cp_sizes, units=units)
def test_a_rank_holds_two_opposite_chunks_of_every_document(cp, units):
    lengths = [2 * cp * n for n in units]
    for rank in range(cp):
        expected = zigzag_by_definition(lengths, cp, rank)
        assert torch.equal(local_indices(lengths, cp, rank), expected)


@settings(deadline=None, max_examples=examples(100))
@given(cp=cp_sizes, units=units, data=st.data())
def test_whole_buffer_layouts_take_documents_of_any_length(cp, units, data):
    total = 2 * cp * sum(units)
    cuts = data.draw(st.lists(st.integers(0, total), max_size=4).map(sorted))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    for rank in range(cp):
        buffer = local_indices(lengths, cp, rank, SequenceLayout.ZIGZAG_BUFFER)
        assert torch.equal(buffer, zigzag_by_definition([total], cp, rank))
        piece = local_indices(lengths, cp, rank, SequenceLayout.CONTIGUOUS)
        assert torch.equal(
            piece, torch.arange(total).chunk(cp)[rank] if total else piece
        )


@settings(deadline=None, max_examples=examples(100))
@given(cp=cp_sizes, units=units, layout=st.sampled_from(SequenceLayout))
def test_every_token_is_held_by_exactly_one_rank(cp, units, layout):
    lengths = [2 * cp * n for n in units]
    held = torch.cat([local_indices(lengths, cp, rank, layout) for rank in range(cp)])
    assert torch.equal(held.sort().values, torch.arange(sum(lengths)))
    assert torch.equal(held, inverse(rank_order_of_sequence(lengths, cp, layout)))
    for rank in (-1, cp):
        with pytest.raises(
            ValueError, match=f"cp_rank={rank} is not one of 0 .. {cp - 1}"
        ):
            local_indices(lengths, cp, rank, layout)


@pytest.mark.parametrize("cp", [2, 4])
def test_torchs_own_context_parallelism_cuts_sequences_likewise(cp):
    """What ``torch.distributed.tensor.experimental.context_parallel`` shards buffers
    by."""
    module = "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    balancer = getattr(pytest.importorskip(module), "_HeadTailLoadBalancer", None)
    if balancer is None:
        pytest.skip("this torch keeps it elsewhere")
    order = balancer(24 * cp, cp, "cpu")._generate_indices()
    held = [local_indices([24 * cp], cp, rank) for rank in range(cp)]
    assert torch.equal(order.flatten(), torch.cat(held))


@pytest.mark.gpu
@pytest.mark.parametrize("cp", [2, 4])
def test_transformer_engine_cuts_documents_likewise(cp):
    engine = pytest.importorskip("transformer_engine_torch")
    lengths = [2 * cp * n for n in (6, 10, 1)]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    for rank in range(cp):
        theirs = engine.thd_get_partitioned_indices(offsets, sum(lengths), cp, rank)
        assert torch.equal(theirs.long().cpu(), local_indices(lengths, cp, rank))


@pytest.mark.parametrize("lengths", [(6, 6), (6, 10), (8, 2)])
def test_lengths_that_divide_by_cp_but_not_by_twice_cp_are_refused(lengths):
    other_layouts = "name that layout as cp_layout: 'zigzag_buffer', 'contiguous'"
    padded = "and pass the padded boundaries as cu_seqlens_q_padded"
    said = (
        rf"not a multiple of 4.* Pad the .* to \d+ tokens {padded}; .*{other_layouts}"
    )
    with pytest.raises(SizeError, match=said):
        rank_order_of_sequence(lengths, 2)


def test_whole_buffers_that_do_not_divide_are_refused():
    """A buffer is padded at its end, which needs no boundaries of its own."""
    said = r"packed buffer 0 has 6 tokens, .* multiple of 4: .* to 8 tokens; or"
    with pytest.raises(ValueError, match=said):
        rank_order_of_sequence([1, 5], 2, SequenceLayout.ZIGZAG_BUFFER)
    with pytest.raises(ValueError, match=said):
        rank_order_of_sequence([1, 5], 4, SequenceLayout.CONTIGUOUS)


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="cp_rank=2"):
        local_indices([8], 2, 2)


@pytest.mark.parametrize("layout", SequenceLayout)
def test_a_layout_by_its_name_is_the_layout(layout):
    """A name that is no member of the enum would be cut as zigzag, whatever it says."""
    by_name = local_indices([12, 20], 2, 1, layout.value)
    assert torch.equal(by_name, local_indices([12, 20], 2, 1, layout))
    said = (
        "unknown context-parallel layout 'zigzig'.*'zigzag', 'zigzag_buffer', "
        "'contiguous'"
    )
    with pytest.raises(ValueError, match=said):
        local_indices([12, 20], 2, 1, "zigzig")
