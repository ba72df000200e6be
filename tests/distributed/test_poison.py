"""A document's contents, whatever they are, change no bit of another document."""

import pytest

from tests.distributed.poison_laws import documents_keep_their_bits

LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]
EXCHANGES = ("gather", "share")


def test_the_layer_alone(pools):
    pools(2).run(documents_keep_their_bits, 1, "auto", "zigzag", (7, 0, 70, 3), (None,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_headwise(pools, layout):
    pools(2).run(documents_keep_their_bits, 2, "headwise", layout, (16, 8, 0, 24), (None,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_chunkwise(pools, cp, layout):
    """Documents within one rank, cut once, and across several ranks."""
    lengths = (16, 8, 0, 56, 16) if layout == "zigzag" else (5, 9, 0, 50, 3, 29)
    exchanges = EXCHANGES if cp == 4 else (None,)
    pools(cp).run(documents_keep_their_bits, cp, "chunkwise", layout, lengths, exchanges)
