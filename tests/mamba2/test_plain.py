"""The plain SSD rule equals the recurrence token by token, states in and out included."""

import pytest
import torch

from megatron_gdn.mamba2.plain import PlainSSD, SSDInputs
from megatron_gdn.ops.rules.base import Saved
from tests.whole_groups import whole_groups

from .oracle import H, K, V, documents_of, oracle, random_inputs

RULE = PlainSSD()
UNEQUAL = (1, 63, 64, 0, 65, 130)


def close(got, expected, tolerance=1e-11):
    for name, a, b in zip(("x", "B", "C", "dt", "g", "D"), got, expected, strict=False):
        scale = b.abs().max()
        assert (a.double() - b).abs().max() <= tolerance * scale, name


def states(count):
    made = torch.Generator().manual_seed(count)
    return [torch.randn(count, H, K, V, generator=made, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("few_chunks", [False, True], ids=["one group", "many groups"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("per_channel_D", [False, True], ids=["D of heads", "D of channels"])
def test_output_final_state_and_gradients_are_those_of_the_recurrence(
    monkeypatch, few_chunks, packed, per_channel_D
):
    if few_chunks:  # groups of two chunks, so that states are carried from group to group
        from megatron_gdn.ops.rules import chunk_table

        monkeypatch.setattr(chunk_table, "_AT_ONCE", 2 * H)
    lengths = UNEQUAL if packed else (150, 150)
    inputs, d_o = random_inputs(
        sum(lengths) if packed else 150, 1 if packed else 2, per_channel_D=per_channel_D
    )
    documents = documents_of(lengths) if packed else None
    initial, d_final = states(len([n for n in lengths if n]))
    for first, last in ((None, None), (initial, d_final)):
        o, final, grads, _ = oracle(inputs, lengths, d_o, first, last)
        got = RULE.begin(inputs, documents).run(first, final=True)
        close([got.o], [o])
        close([got.final], [final])
        close(RULE.begin_backward(d_o, inputs, Saved(), documents).run(first, last), grads)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_maps_and_gradients_of_entering_states(packed):
    lengths = UNEQUAL if packed else (150, 150)
    inputs, d_o = random_inputs(sum(lengths) if packed else 150, 1 if packed else 2)
    documents = documents_of(lengths) if packed else None
    initial, d_final = states(len([n for n in lengths if n]))
    _, final, _, d_initial = oracle(inputs, lengths, d_o, initial, d_final)
    maps = RULE.begin(inputs, documents).state_map()
    assert maps.is_diagonal
    close([maps.apply(initial)], [final])
    local = RULE.begin_backward(d_o, inputs, Saved(), documents).d_initial()
    close([maps.transposed(local).apply(d_final)], [d_initial])


def test_documents_over_batch_rows_lie_end_to_end():
    inputs, d_o = random_inputs(50, B=2)
    flat = SSDInputs(*(t.flatten(0, 1)[None] for t in inputs))
    documents = documents_of((30, 40, 0, 30))
    o = RULE.begin(inputs, documents).run().o
    assert torch.equal(o.flatten(0, 1), RULE.begin(flat, documents).run().o[0])
    grads = RULE.begin_backward(d_o, inputs, Saved(), documents).run()
    one_row = RULE.begin_backward(d_o.flatten(0, 1)[None], flat, Saved(), documents).run()
    for a, b in zip(grads, one_row, strict=True):
        assert torch.equal(a.flatten(0, 1), b[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_computed_in_fp32_and_rounded_once(dtype):
    inputs, d_o = random_inputs(200, dtype=dtype)
    o, _, grads, _ = oracle(inputs, (200,), d_o)
    got = RULE.begin(inputs, None).run().o
    found = RULE.begin_backward(d_o, inputs, Saved(), None).run()
    assert got.dtype == dtype and [t.dtype for t in found] == [t.dtype for t in inputs]
    # One rounding to the dtype; what is before is fp32 sums of a few hundred terms.
    unit = torch.finfo(dtype).eps / 2
    close([got], [o], unit + 1e-5)
    close(found, grads, unit + 1e-5)


@whole_groups()
def test_a_documents_bits_depend_neither_on_its_neighbours_nor_on_its_place():
    lengths = (70, 129, 33)
    inputs, d_o = random_inputs(sum(lengths), dtype=torch.float32)
    documents, at = documents_of(lengths), slice(70, 199)
    alone = SSDInputs(*(t[:, at] for t in inputs))
    o = RULE.begin(inputs, documents).run().o
    assert torch.equal(o[:, at], RULE.begin(alone, documents_of((129,))).run().o)
    grads = RULE.begin_backward(d_o, inputs, Saved(), documents).run()
    of_alone = RULE.begin_backward(d_o[:, at], alone, Saved(), documents_of((129,))).run()
    for a, b in zip(grads, of_alone, strict=True):
        assert torch.equal(a[:, at], b)


def test_the_strongest_decays_leave_no_nan():
    inputs, d_o = random_inputs(130, dtype=torch.float32)
    inputs = inputs._replace(g=torch.full_like(inputs.g, -104.0))
    got = RULE.begin_backward(d_o, inputs, Saved(), None).run()
    assert all(t.isfinite().all() for t in (*got, RULE.begin(inputs, None).run().o))
