"""A document's contents, whatever they are, change no bit of another document."""

import pytest
import torch
from megatron.core import parallel_state

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import over_ranks, randomise_, thd
from tests.parallel import parallel

POISONS = (float("nan"), float("inf"), float("-inf"), 3e38)


def documents_keep_their_bits(
    cp: int, mode: str, layout: str, lengths: tuple[int, ...]
) -> None:
    """Output and input gradient of every document, whatever stands in one of the
    others.

    Inputs and output gradients of one document at a time are poisoned; the others' bits
    must be those of a run without. ``cp`` of 1 is the layer alone.
    """
    failures = []
    with parallel(cp=cp):
        rank = parallel_state.get_context_parallel_rank()
        mine = local_indices(lengths, cp, rank, SequenceLayout.parse(layout))
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[
            mine
        ]
        torch.manual_seed(7)
        layer = over_ranks(linear_cp_mode=mode, cp_layout=layout)
        randomise_(layer)
        x, dy = torch.randn(2, sum(lengths), 1, layer.hidden_size)[:, mine]

        def run(x, dy, layer=layer):
            leaf = x.clone().requires_grad_()
            y, _ = layer(leaf, None, packed_seq_params=thd(lengths))
            return y.detach(), *torch.autograd.grad(y, leaf, dy)

        clean = run(x, dy)
        assert all(tensor.isfinite().all() for tensor in clean)
        for n in range(len(lengths)):
            ill = document == n
            for poison in (POISONS[0], POISONS[1 + n % 3]) if lengths[n] else ():
                got = run(*(t.masked_fill(ill[:, None, None], poison) for t in (x, dy)))
                where = f"{poison} in document {n} of {lengths}"
                for name, bits, expected in zip(("y", "dx"), got, clean, strict=True):
                    if not torch.equal(bits[~ill], expected[~ill]):
                        failures.append(f"another document's {name}: {where}")
                if poison != 3e38 and ill.any() and got[0][ill].isfinite().all():
                    failures.append(f"not felt in its own document: {where}")
    # Not before: the other ranks would wait in the next collective.
    assert not failures, failures


layouts = pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])


def test_the_layer_alone(pools):
    pools(2).run(documents_keep_their_bits, 1, "auto", "zigzag", (7, 0, 70, 3))


@layouts
def test_headwise(pools, layout):
    pools(2).run(documents_keep_their_bits, 2, "headwise", layout, (16, 8, 0, 24))


@pytest.mark.parametrize(
    "layout",
    [pytest.param("zigzag", marks=pytest.mark.slow), "zigzag_buffer", "contiguous"],
)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_chunkwise(pools, cp, layout):
    """Documents within one rank, cut once, and across several ranks."""
    lengths = (16, 8, 0, 56, 16) if layout == "zigzag" else (5, 9, 0, 50, 3, 29)
    pools(cp).run(documents_keep_their_bits, cp, "chunkwise", layout, lengths)
