"""The aligned mixer: training, prefill and decode give a token the same bits, however it comes."""

import pytest
import torch

from megatron_gdn.inference import decode, gdn_rows, prefill
from megatron_gdn.ops.aligned import AlignedRule
from megatron_gdn.ops.mixer import gated_delta_mixer
from tests.inference.row_mixers import (
    SIZES,
    documents_of,
    draw_rows,
    make_parameters,
    rule_for,
    trained,
)

# No multiple of a vector's width, so that elementwise kernels have ends to treat otherwise.
assert SIZES.width % 16 and SIZES.conv_width % 32 == 24


def aligned_mixer(dtype=torch.float32):
    parameters, norm = make_parameters(dtype)
    rows = draw_rows(1, 1, dtype)
    return gdn_rows(rows, **parameters, sizes=SIZES, rule=AlignedRule(), norm=norm)


def trained_aligned(rows, documents=None):
    parameters, norm = make_parameters(rows.dtype)
    return gated_delta_mixer(
        rows, **parameters, sizes=SIZES, rule=AlignedRule(), norm=norm, documents=documents
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "parts",
    [(150,), (1, 149), (63, 1, 86), (64, 86), (70, -5, 60, -9, 6), (-3, 61, -2, 84)],
    ids=str,
)
def test_any_cut_has_the_bits_of_training(parts, dtype):
    mixer, rows = aligned_mixer(dtype), draw_rows(150, 2, dtype)
    whole = trained_aligned(rows)
    carry, at = mixer.shape.zeros(2, dtype, rows.device), 0
    for part in parts:
        piece = rows[at : at + abs(part)]
        if part < 0:
            mixed, after = decode(piece, mixer, carry, stands=[at, at])
            carry = after[-1]
        else:
            mixed, carry = prefill(piece, mixer, carry, stands=[at, at])
        assert torch.equal(mixed, whole[at : at + abs(part)]), (at, part)
        at += abs(part)
    assert at == 150


def test_neighbours_and_place_change_no_bit():
    rows = draw_rows(150, 1)
    whole = trained_aligned(rows)
    lengths = (5, 150, 0, 67)
    packed = torch.cat([draw_rows(5), rows, draw_rows(67)])
    documents = documents_of(lengths)
    assert torch.equal(trained_aligned(packed, documents)[5:155], whole)
    assert torch.equal(trained_aligned(torch.cat([draw_rows(150, 3), rows], 1))[:, 3:], whole)
    mixer, carry = aligned_mixer(), None
    given = [0, 0, 0]
    for counts in ((70, 3, 0), (0, 60, 9), (80, 87, 1)):
        pieces = [rows[a : a + n] for a, n in zip(given, counts, strict=True)]
        mixed, carry = prefill(torch.cat(pieces), mixer, carry, documents_of(counts), stands=given)
        for piece, a, n in zip(mixed.split(list(counts)), given, counts, strict=True):
            assert torch.equal(piece, whole[a : a + n])
        given = [a + n for a, n in zip(given, counts, strict=True)]


def test_it_computes_what_the_plain_mixer_computes_forward_and_backward():
    rows = draw_rows(130, 2)
    torch.testing.assert_close(trained_aligned(rows), trained(rows), rtol=1e-5, atol=1e-5)
    gradients = []
    for run in (trained_aligned, trained_with_gradient):
        leaf = rows.clone().requires_grad_()
        (run(leaf) * draw_rows(130, 2)[..., : SIZES.value_heads * SIZES.value_dim]).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def trained_with_gradient(rows):
    parameters, norm = make_parameters(rows.dtype)
    return gated_delta_mixer(rows, **parameters, sizes=SIZES, rule=rule_for(rows.dtype), norm=norm)


def test_a_sequence_that_goes_on_must_say_where_it_stands():
    mixer = aligned_mixer()
    carry = mixer.shape.zeros(2, torch.float32, torch.device("cpu"))
    for stands in (None, [3]):
        with pytest.raises(ValueError, match="give stands="):
            prefill(draw_rows(4, 2), mixer, carry, stands=stands)
        with pytest.raises(ValueError, match="give stands="):
            decode(draw_rows(4, 2), mixer, carry, stands=stands)
