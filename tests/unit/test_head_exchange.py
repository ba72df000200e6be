"""The head exchange: its tables, shares and packing by definition, and around another
mixer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_gdn import Documents
from megatron_gdn.context_parallel import (
    Headwise,
    MambaContextParallel,
    SequenceLayout,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron_gdn.context_parallel.headwise.exchange import HeadExchange
from megatron_gdn.context_parallel.headwise.shares import waves_of
from megatron_gdn.ops.layout import SizeError
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.gdn_mixer import gdn_dims


def route_of(lengths, *where):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return waves_of(Documents.from_cu_seqlens(offsets, sum(lengths)), *where)


def test_a_long_sequence_needs_two_messages_per_peer_and_documents_two_each():
    def most(lengths, layout=SequenceLayout.ZIGZAG):
        (wave,) = route_of(lengths, 4, 0, layout)
        return max(len(held) for held in wave.fragments)

    assert most((1024,)) == 2
    assert most((64, 32, 128)) == 6
    assert most((64, 32, 128), SequenceLayout.CONTIGUOUS) == 1
    assert most((64, 32, 128), SequenceLayout.ZIGZAG_BUFFER) == 2


def test_every_rank_finds_the_same_mean_fragment():
    """Ranks have different numbers of fragments: the last one's two are neighbours."""
    waves = [
        route_of((64,) * 3, 4, rank, SequenceLayout.ZIGZAG)[0] for rank in range(4)
    ]
    assert [len(held) for held in waves[0].fragments] == [4, 6, 6, 3]
    assert {wave.mean_fragment_tokens for wave in waves} == {8.0}


def exchange_of(units, mebibytes, dtype=torch.bfloat16, ranks=4):
    """Rank 1, whose columns of its own tokens have about this many mebibytes."""
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 1)
    layout = gdn_dims(64, 16, 32, 16, 16).layout
    shares = Headwise(layout, group, SequenceLayout.CONTIGUOUS)._projection_shares
    bytes_per_batch_row = (
        units.total_tokens // ranks * shares.rank_width * dtype.itemsize
    )
    batch = round(mebibytes * 2**20 / bytes_per_batch_row)
    rows = torch.empty(1, batch, 1, dtype=dtype, device="meta")
    return HeadExchange.of(group, shares, units, SequenceLayout.CONTIGUOUS, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("ranks", "mebibytes", "waves", "own_messages", "carried"),
    [
        (4, 15.8, 1, False, True),
        (4, 16.2, 1, False, False),
        (4, 27.8, 1, False, False),
        (4, 28.2, 1, True, False),
        (4, 63.8, 1, True, False),  # 191 MiB for three peers: too few for two waves
        (4, 64.2, 2, True, False),
        (4, 400, 2, True, False),
        (16, 12.7, 1, False, True),
        (16, 12.9, 2, False, False),
    ],
)
def test_large_exchanges_travel_in_two_waves_fragment_by_fragment(
    dtype, ranks, mebibytes, waves, own_messages, carried
):
    """At the sizes from which on this took less time on 4 H200 (exchange.py)."""
    units = Documents.from_cu_seqlens((0, 64), 64)
    exchange = exchange_of(units, mebibytes, dtype, ranks)
    assert len(exchange.waves) == waves and exchange.packs_kept_rows == carried
    sent = {exchange.sends_fragments(wave) for wave in exchange.waves}
    assert sent == {own_messages}


def test_fixed_buffers_travel_in_one_message_per_peer():
    """The fragments of the documents that a replay has are not known on the host."""
    exchange = exchange_of(StaticDocuments(64, 3), 400)
    assert len(exchange.waves) == 2
    for wave in exchange.waves:
        assert wave.positions is None and not exchange.sends_fragments(wave)


def test_a_route_is_built_once_for_the_same_values():
    def built():
        return route_of((16, 32), 2, 1, SequenceLayout.ZIGZAG)

    assert built() is built()


STATE = 3
DIM = 2
TAPS = 4


class Owner(nn.Module):
    def __init__(self, heads: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        channels = heads * DIM + 2 * groups * STATE
        self.conv1d = nn.Conv1d(channels, channels, TAPS, groups=channels, bias=bias)
        self.dt_bias, self.A_log, self.D = (
            nn.Parameter(torch.randn(heads)) for _ in range(3)
        )


def adapter(heads, groups, ranks, place=0, **options):
    owner = Owner(heads, groups, **options)
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: place)
    return MambaContextParallel(group, heads, DIM, groups, STATE, owner), owner


@pytest.mark.parametrize(
    ("sizes", "local"),
    [
        ((8, 8, 2), (4, 4, 1)),
        ((8, 8, 4), (2, 2, 1)),
        ((16, 8, 4), (4, 2, 1)),
        ((8, 1, 2), (4, 1, 2)),
        ((8, 2, 4), (2, 1, 2)),
        ((16, 1, 4), (4, 1, 4)),
        ((8, 2, 1), (8, 2, 1)),
    ],
)
def test_heads_groups_and_copies_of_a_rank(sizes, local):
    cp, owner = adapter(*sizes)
    assert (cp.num_heads_local, cp.n_groups_local, cp.group_repeat_count) == local
    assert (cp.mixer, cp.cp_group.size()) == (owner, sizes[2])
    assert (cp.d_inner, cp.d_inner_local) == (sizes[0] * DIM, local[0] * DIM)
    whole = (cp.num_heads, cp.n_groups, cp.cp_size, cp.head_dim, cp.d_state)
    assert whole == (*sizes, DIM, STATE)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((6, 2, 4), "cannot share the 6 heads and 2 groups .* use one of 1, 2, 6"),
        ((7, 2, 1), "num_heads=7 is not a multiple of n_groups=2"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_can(sizes, said):
    with pytest.raises(SizeError, match=said):
        adapter(*sizes)


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"), [(8, 8, 4), (8, 2, 4), (16, 1, 4)]
)
def test_parameters_are_read_when_asked_for_and_shared_by_section(heads, groups, ranks):
    inner = heads * DIM
    copies = max(1, ranks // groups)
    for place in range(ranks):
        cp, owner = adapter(heads, groups, ranks, place)
        x, B, C = torch.arange(len(owner.conv1d.bias)).split(
            [inner] + 2 * [groups * STATE]
        )
        of_groups = [s.chunk(ranks // copies)[place // copies] for s in (B, C)]
        rows = torch.cat([x.chunk(ranks)[place], *of_groups])
        assert torch.equal(cp.get_conv1d_weight(), owner.conv1d.weight[rows, 0])
        assert torch.equal(cp.get_conv1d_bias(), owner.conv1d.bias[rows])
        first = place * heads // ranks
        for name in ("dt_bias", "A_log", "D"):
            share = getattr(cp, f"get_{name}")()
            whole = getattr(owner, name)
            assert torch.equal(share, whole.chunk(ranks)[place])
            assert share.data_ptr() == whole[first:].data_ptr()
            gathered = torch.randn(heads)
            got = getattr(cp, f"get_{name}")(gathered)
            assert got.data_ptr() == gathered[first:].data_ptr()
        owner.D = nn.Parameter(torch.full((heads,), 5.0))
        assert cp.get_D().eq(5).all()
        (cp.get_conv1d_weight().sum() + cp.get_A_log().sum()).backward()
        assert (
            owner.conv1d.weight.grad[:, 0, 0].nonzero().flatten().equal(rows.sort()[0])
        )
        assert owner.A_log.grad.sum() == heads // ranks


def test_one_rank_gets_the_very_tensors():
    cp, owner = adapter(8, 2, 1, bias=False)
    x = torch.randn(2, 5, 9)
    assert cp.pre_conv_ssm(x) is x and cp.post_conv_ssm(x) is x
    assert cp.get_A_log() is owner.A_log and cp.get_conv1d_bias() is None
    assert cp.get_conv1d_weight().shape == (len(owner.conv1d.weight), TAPS)
    assert not isinstance(cp, nn.Module)
    for exchange in (tensor_a2a_cp2hp, tensor_a2a_hp2cp):
        assert exchange(x, 0, -1, cp.cp_group) is x
    assert get_parameter_local_cp(owner.A_log, 0, cp.cp_group) is owner.A_log
