"""The aligned mixer: training, prefill and decode give a token the same bits, however it comes."""

import pytest
import torch

from megatron_gdn.inference import decode, prefill
from tests.inference.row_mixers import KINDS, documents_of

# No multiple of a vector's width, so that elementwise kernels have ends to treat otherwise.
assert all(kind.layout.width % 16 and kind.layout.conv_width % 32 for kind in KINDS)

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "parts",
    [(150,), (1, 149), (63, 1, 86), (64, 86), (70, -5, 60, -9, 6), (-3, 61, -2, 84)],
    ids=str,
)
def test_any_cut_has_the_bits_of_training(kind, parts, dtype):
    mixer, rows = kind.mixer(dtype, aligned=True), kind.rows(150, 2, dtype)
    whole = kind.trained(rows, aligned=True)
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


def test_neighbours_and_place_change_no_bit(kind):
    rows = kind.rows(150, 1)
    whole = kind.trained(rows, aligned=True)
    lengths = (5, 150, 0, 67)
    packed = torch.cat([kind.rows(5), rows, kind.rows(67)])
    assert torch.equal(kind.trained(packed, lengths, aligned=True)[5:155], whole)
    assert torch.equal(
        kind.trained(torch.cat([kind.rows(150, 3), rows], 1), aligned=True)[:, 3:], whole
    )
    mixer, carry = kind.mixer(aligned=True), None
    given = [0, 0, 0]
    for counts in ((70, 3, 0), (0, 60, 9), (80, 87, 1)):
        pieces = [rows[a : a + n] for a, n in zip(given, counts, strict=True)]
        mixed, carry = prefill(torch.cat(pieces), mixer, carry, documents_of(counts), stands=given)
        for piece, a, n in zip(mixed.split(list(counts)), given, counts, strict=True):
            assert torch.equal(piece, whole[a : a + n])
        given = [a + n for a, n in zip(given, counts, strict=True)]


def test_it_computes_what_the_plain_mixer_computes_forward_and_backward(kind):
    rows = kind.rows(130, 2)
    torch.testing.assert_close(
        kind.trained(rows, aligned=True), kind.trained(rows), rtol=1e-5, atol=1e-5
    )
    gradients = []
    for aligned in (True, False):
        leaf = rows.clone().requires_grad_()
        mixed = kind.trained(leaf, aligned=aligned)
        (mixed * kind.rows(130, 2)[..., : mixed.shape[-1]]).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_sequence_that_goes_on_must_say_where_it_stands(kind):
    mixer = kind.mixer(aligned=True)
    carry = mixer.shape.zeros(2, torch.float32, torch.device("cpu"))
    for stands in (None, [3]):
        with pytest.raises(ValueError, match="give stands="):
            prefill(kind.rows(4, 2), mixer, carry, stands=stands)
        with pytest.raises(ValueError, match="give stands="):
            decode(kind.rows(4, 2), mixer, carry, stands=stands)
