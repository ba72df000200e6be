"""The packing kernels against their plain-torch twin, bit for bit: they copy, or add in
order."""

import pytest
import torch

from megatron_gdn.context_parallel.headwise import pack, pack_torch
from megatron_gdn.context_parallel.headwise.shares import HeadShares

from .conftest import INTERPRETED

SHARES = {
    "one section": HeadShares.even(2, (64,)),
    "six sections": HeadShares.even(4, (32, 32, 96, 96, 8, 8)),
    "odd widths": HeadShares.even(3, (21, 3, 2100 * 3)),
    "two copies": HeadShares(4, (24, 24, 40, 40, 4, 4), (2, 2, 1, 1, 1, 1)),
    "copies of all": HeadShares(3, (20, 9, 33), (3, 3, 1)),
}
# The interpreter adds bfloat16 wrongly; it copies it rightly.
DTYPES = [torch.float32, torch.float16, torch.float64] + (
    [] if INTERPRETED else [torch.bfloat16]
)


class Rows:
    """Whole rows, messages and full rows of one rank, filled with random numbers or
    NaN."""

    def __init__(self, shares, device, *, s, B, dtype=torch.float32, strided=True):
        make = torch.Generator().manual_seed(s + B)
        extra = 8 if strided else 0

        def normal(*shape):
            return torch.randn(*shape, generator=make).to(device, dtype)

        self.shares = shares
        self.rank = shares.rank_count - 2
        self.whole = normal(s, B + extra, shares.width + extra)
        self.whole = self.whole[:, :B, : shares.width]
        self.messages = normal(shares.rank_count - 1, s, B, shares.rank_width)
        self.full = normal(shares.rank_count * s, B, shares.rank_width)
        order = (
            torch.randperm(shares.rank_count * s, generator=make)
            .to(torch.int32)
            .to(device)
        )
        self.own_place, self.peer_place = order[:s].contiguous(), order[s:].contiguous()

    def both(self, name, target: str, *sources: str, **options) -> None:
        """The kernel and its twin write the same into the same NaNs."""
        results = []
        for module in (pack, pack_torch):
            result = torch.full_like(getattr(self, target), torch.nan)
            if target == "whole":  # keep the strides of a slice
                result = torch.full_like(self.whole._base, torch.nan)[
                    :, : self.whole.shape[1], : self.whole.shape[2]
                ]
            given = {**vars(self), target: result}
            getattr(module, name)(*(given[source] for source in sources), **options)
            results.append(result)
        assert results[1].isfinite().any()
        assert torch.equal(*(x.nan_to_num(nan=12345.0) for x in results))


@pytest.fixture(params=SHARES)
def shares(request):
    return SHARES[request.param]


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("s", "B"), [(1, 1), (5, 3), (17, 1)])
def test_packing_and_unpacking_equal_the_twin(shares, device, s, B, dtype):
    rows = Rows(shares, device, s=s, B=B, dtype=dtype)
    rows.both("pack_peers", "messages", "whole", "messages", "shares", "rank")
    own = "whole", "full", "shares", "rank", "own_place"
    rows.both("copy_kept_rows", "full", *own, to_hp=True)
    if min(shares.copies) == 1:
        rows.both("copy_kept_rows", "whole", *own, to_hp=False)
    rows.both(
        "unpack_peers",
        "whole",
        "messages",
        "full",
        "whole",
        "shares",
        "rank",
        "own_place",
    )


@pytest.mark.each_value
@pytest.mark.parametrize(("s", "B"), [(1, 1), (5, 3), (17, 1)])
def test_own_rows_go_along_with_the_peers(shares, device, s, B):
    rows = Rows(shares, device, s=s, B=B)
    pack_peers = "whole", "messages", "shares", "rank"
    rows.both(
        "pack_peers",
        "messages",
        *pack_peers,
        kept_rows=(rows.full.clone(), rows.own_place),
    )
    fulls = []
    for module, way in ((pack, {}), (pack_torch, {}), (pack_torch, {"apart": True})):
        full = torch.full_like(rows.full, 7.0)
        given = [vars(rows)[name] for name in pack_peers]
        kept_rows = None if way else (full, rows.own_place)
        module.pack_peers(*given, kept_rows=kept_rows)
        if way:
            module.copy_kept_rows(
                rows.whole, full, shares, rows.rank, rows.own_place, to_hp=True
            )
        fulls.append(full)
    assert torch.equal(fulls[0], fulls[2]) and torch.equal(fulls[1], fulls[2])
    rows.both(
        "unpack_peers",
        "whole",
        "messages",
        "full",
        "whole",
        "shares",
        "rank",
        "own_place",
        with_kept_rows=True,
    )


@pytest.mark.each_value
@pytest.mark.parametrize(("s", "B"), [(1, 1), (5, 3), (17, 1)])
def test_moving_rows_equals_the_twin(shares, device, s, B):
    rows = Rows(shares, device, s=s, B=B)
    for target in ("full", "messages"):
        rows.both(
            "move_rows",
            target,
            "messages",
            "full",
            "peer_place",
            to_hp=target == "full",
        )


def test_a_long_batch_takes_the_larger_tiles(device):
    shares = HeadShares(2, (4, 4, 8), (2, 2, 1))
    rows = Rows(shares, device, s=2049, B=2)
    rows.both("pack_peers", "messages", "whole", "messages", "shares", "rank")
    rows.both(
        "unpack_peers",
        "whole",
        "messages",
        "full",
        "whole",
        "shares",
        "rank",
        "own_place",
    )


def test_no_tokens_are_no_work(device):
    rows = Rows(SHARES["two copies"], device, s=0, B=1)
    pack.pack_peers(rows.whole, rows.messages, rows.shares, rows.rank)
    pack.unpack_peers(
        rows.messages, rows.full, rows.whole, rows.shares, rows.rank, rows.own_place
    )


def test_an_expanded_gradient_has_no_strides_to_speak_of(device):
    """What ``out.sum().backward()`` sends: every token and batch row the same
    memory."""
    shares = SHARES["six sections"]
    rows = Rows(shares, device, s=5, B=2)
    rows.whole = rows.whole[0, 0].expand(5, 2, shares.width)
    rows.both("pack_peers", "messages", "whole", "messages", "shares", "rank")
