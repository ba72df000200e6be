import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.ssm import gated_delta_net as upstream

from megatron_gdn import (
    Documents,
    GDNDims,
    SequenceLayout,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron_gdn.context_parallel import Headwise, local_indices
from megatron_gdn.context_parallel.headwise import exchange, pack_torch
from megatron_gdn.context_parallel.headwise.exchange import HeadExchange
from megatron_gdn.context_parallel.layouts import units_of_layout
from megatron_gdn.mixers.tensor_map import take_share
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN
from tests.ranks import on_ranks

sizes = pytest.mark.parametrize("size", [2, 4])
directly = pytest.mark.parametrize("direct", [True, False], ids=["runs", "second pass"])
SECTIONS = (8, 4, 12)
# Two key heads of 3 and four value heads of 5.
HEADS = {
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_head_dim": 3,
    "value_head_dim": 5,
}
DOCUMENTS = {
    "dense": None,
    "unequal": (16, 0, 8, 24),
}


def _scheme(layout: str, **changes) -> tuple[GDNDims, Headwise]:
    dims = GDNDims(hidden_size=8, conv_kernel_dim=4, **{**HEADS, **changes})
    return dims, Headwise(dims.layout, dist.group.WORLD, SequenceLayout(layout))


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _columns(dims: GDNDims, rank: int, size: int) -> list[int]:
    """The projection's columns that a rank's value heads need, head by head."""
    value_heads = range(dims.num_value_heads)[rank * dims.num_value_heads // size :]
    value_heads = value_heads[: dims.num_value_heads // size]
    key_heads = sorted({head // dims.value_heads_per_key_head for head in value_heads})
    used = [key_heads, key_heads, value_heads, value_heads, value_heads, value_heads]
    columns = []
    start = 0
    for section, name, heads in zip(
        dims.layout.widths, dims.layout.names, used, strict=True
    ):
        per_head = section // (
            dims.num_key_heads if name in ("query", "key") else dims.num_value_heads
        )
        columns += [start + h * per_head + i for h in heads for i in range(per_head)]
        start += section
    return columns


def travelling(waves: int, direct: bool, own: int = 0):
    """The smallest exchange travels in ``waves`` too; up to ``own`` bytes are carried
    along."""
    message = 0 if direct else 1 << 40
    sizes = {
        "LEAST_WAVE_BYTES": 1,
        "LEAST_FRAGMENT_BYTES": message,
        "MOST_KEPT_BYTES": own,
    }
    return patch.multiple(exchange, MOST_WAVES=waves, **sizes)


def layer_equals_one_rank(waves: int, direct: bool, *args, **options) -> None:
    with travelling(waves, direct):
        parallel_equals_one_rank(GDN, *args, **options)


def open_gives_every_rank_its_heads(
    layout: str, packed: str, batch: int, waves: int = 1, direct: bool = True, **heads
) -> None:
    for own in (0, 1 << 40) if waves == 1 else (0,):
        _open_gives_every_rank_its_heads(
            layout, packed, batch, waves, direct, own, **heads
        )


def _open_gives_every_rank_its_heads(
    layout: str, packed: str, batch: int, waves: int, direct: bool, own: int, **heads
) -> None:
    """Open and close and both gradients, bit for bit; copies add up in the order of the
    ranks."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    device = _device()
    dims, scheme = _scheme(layout, **heads)
    lengths = DOCUMENTS[packed] or (16 * size,)
    tokens = sum(lengths)
    documents = None
    if DOCUMENTS[packed]:
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        documents = Documents.from_cu_seqlens(offsets, tokens, device=device)
    held = local_indices(lengths, size, rank, SequenceLayout(layout))
    assert torch.equal(scheme.local_positions(documents, tokens), held)
    torch.manual_seed(3)
    whole = torch.randn(tokens, batch, dims.layout.width, device=device)
    gradients = torch.randn(size, tokens, batch, scheme.layout.width, device=device)
    with travelling(waves, direct, own):
        cut = units_of_layout(SequenceLayout(layout), documents, tokens, device)
        made = HeadExchange.of(
            dist.group.WORLD,
            scheme._projection_shares,
            cut,
            SequenceLayout(layout),
            whole[held],
        )
        passage = scheme.passage(documents, tokens, batch, whole)
        assert len(made.waves) == waves
        assert all(made.sends_fragments(wave) == direct for wave in made.waves)
        assert made.packs_kept_rows == (waves == 1 and own > 0)

        # Strided rows: a batch dimension that is not the innermost of what is stored.
        mine = whole[held].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        opened = passage.to_stages(mine)
        assert opened.is_contiguous()
        assert torch.equal(opened, whole[..., _columns(dims, rank, size)])
        opened.backward(gradients[rank])
        expected = torch.zeros_like(whole)
        for other in range(size):
            expected[..., _columns(dims, other, size)] += gradients[other]
        assert torch.equal(mine.grad, expected[held])

        mixed = torch.randn(tokens, batch, dims.v_dim, device=device)
        share = dims.v_dim // size
        inside = (
            mixed[..., rank * share : (rank + 1) * share].contiguous().requires_grad_()
        )
        closed = passage.from_stages(inside)
        assert torch.equal(closed, mixed[held])
        weight = torch.randn(tokens, batch, dims.v_dim, device=device)
        closed.backward(weight[held])
        assert torch.equal(inside.grad, weight[..., rank * share : (rank + 1) * share])


def sums_over_copies_are_rounded_once_in_the_order_of_ranks() -> None:
    """bf16 gradients whose sum depends on the order and on every rounding between."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    device = _device()
    _, scheme = _scheme("contiguous", num_key_heads=1)
    torch.manual_seed(5)
    gradients = torch.randn(
        size, 8 * size, 2, scheme.layout.width, device=device
    ).bfloat16()
    mine = (
        torch.zeros(8, 2, scheme._projection_shares.width, device=device)
        .bfloat16()
        .requires_grad_()
    )
    scheme.passage(None, 8 * size, 2, mine).to_stages(mine).backward(gradients[rank])
    total = torch.zeros(8, 2, 3, device=device)
    for other in range(size):
        total += gradients[other, 8 * rank : 8 * (rank + 1), :, :3].float()
    assert torch.equal(mine.grad[..., :3], total.bfloat16())


@sizes
@pytest.mark.parametrize("sections", [None, SECTIONS])
@on_ranks("size")
def test_the_all_to_alls_are_upstreams(size, sections):
    """The same call of both packages: the same output and gradient, bit for bit."""
    group = dist.group.WORLD
    inside = None if sections is None else [section // size for section in sections]
    width = sum(SECTIONS)
    for ours, theirs, shape, widths in (
        (tensor_a2a_cp2hp, upstream.tensor_a2a_cp2hp, (4, 2, width), sections),
        (
            tensor_a2a_hp2cp,
            upstream.tensor_a2a_hp2cp,
            (4 * size, 2, width // size),
            inside,
        ),
    ):
        for balanced in (True, False):
            torch.manual_seed(dist.get_rank())
            x = torch.randn(*shape, dtype=torch.float64)
            found = []
            for function in (ours, theirs):
                leaf = x.clone().requires_grad_()
                y = function(leaf, 0, -1, group, widths, balanced)
                torch.manual_seed(7 + dist.get_rank())
                (y * torch.randn_like(y)).sum().backward()
                found.append((y.detach(), leaf.grad))
            assert torch.equal(found[0][0], found[1][0]), (ours.__name__, balanced)
            assert torch.equal(found[0][1], found[1][1]), (ours.__name__, balanced)


@sizes
@on_ranks("size")
def test_parameter_shares_rebuild_the_parameter_and_its_gradient(size):
    rank = dist.get_rank()
    size = dist.get_world_size()
    whole = torch.arange(float(sum(SECTIONS) * 2)).view(-1, 2).requires_grad_()
    share = get_parameter_local_cp(whole, 0, dist.group.WORLD, SECTIONS)
    assert torch.equal(share, take_share(whole, 0, SECTIONS, rank, size))
    share.sum().backward()
    gradient = whole.grad.clone()
    dist.all_reduce(gradient)
    assert torch.equal(gradient, torch.ones_like(whole))
    plain = get_parameter_local_cp(whole, 0, dist.group.WORLD)
    assert plain.data_ptr() == whole.chunk(size)[rank].data_ptr()


@on_ranks(2)
def test_bad_exchanges_are_refused():
    group = dist.group.WORLD
    for call, message in (
        (
            lambda: tensor_a2a_cp2hp(torch.zeros(4, 8), 0, -1, group),
            "seq_dim=0 and head_dim=-1",
        ),
        (lambda: tensor_a2a_cp2hp(torch.zeros(4, 1, 8), 1, -1, group), "seq_dim=1"),
        (lambda: tensor_a2a_cp2hp(torch.zeros(4, 1, 8), 0, 1, group), "head_dim=1"),
        (
            lambda: tensor_a2a_cp2hp(torch.zeros(4, 1, 7), 0, -1, group),
            "each be a multiple",
        ),
        (
            lambda: tensor_a2a_cp2hp(torch.zeros(4, 1, 8), 0, -1, group, (4, 2)),
            "add up to the width",
        ),
        (
            lambda: tensor_a2a_cp2hp(torch.zeros(3, 1, 8), 0, -1, group),
            "not a multiple of",
        ),
        (
            lambda: tensor_a2a_hp2cp(torch.zeros(5, 1, 8), 0, -1, group),
            "cannot be shared",
        ),
        (
            lambda: tensor_a2a_hp2cp(torch.zeros(4, 1, 6), 0, -1, group, (8, 4)),
            "widths before the exchange. Give the widths that a rank holds",
        ),
        (
            lambda: tensor_a2a_hp2cp(torch.zeros(4, 1, 6), 0, -1, group, (4, 1)),
            "[4, 1] must add up to 6",
        ),
        (
            lambda: get_parameter_local_cp(torch.zeros(7), 0, group),
            "each be a multiple",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.each_value
@directly
@sizes
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_open_gives_every_rank_its_heads(pools, size, layout, batch, waves, direct):
    pools(size).run(
        open_gives_every_rank_its_heads, layout, "dense", batch, waves, direct
    )


@pytest.mark.each_value
@directly
@sizes
@pytest.mark.parametrize("waves", [1, 5])  # no rank has a multiple of 5 tokens
@pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
def test_open_gives_every_rank_its_heads_of_unequal_documents(
    pools, size, layout, waves, direct
):
    pools(size).run(
        open_gives_every_rank_its_heads, layout, "unequal", 1, waves, direct
    )


@pytest.mark.each_value
@directly
@pytest.mark.parametrize("packed", ["dense", "unequal"])
@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (2, 8), (4, 4)], ids=str)
def test_key_heads_fewer_than_ranks_are_replicated(pools, packed, heads, direct):
    heads = {"num_key_heads": heads[0], "num_value_heads": heads[1]}
    pools(4).run(
        open_gives_every_rank_its_heads, "zigzag", packed, 1, 2, direct, **heads
    )


@pytest.mark.each_value
@directly
@pytest.mark.parametrize("lengths", [None, (8, 0, 24, 16)], ids=["batch", "packed"])
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4)])
def test_the_layer_equals_one_rank_whichever_way_rows_travel(
    pools, tp, cp, lengths, direct
):
    pools(4).run(
        layer_equals_one_rank,
        2,
        direct,
        tp,
        cp,
        lengths=lengths,
        changes={"linear_num_key_heads": 2},
    )


@sizes
def test_sums_over_copies_are_rounded_once_in_the_order_of_ranks(pools, size):
    pools(size).run(sums_over_copies_are_rounded_once_in_the_order_of_ranks)


@sizes
@on_ranks("size")
def test_shared_key_heads_have_their_rows_on_every_rank_that_uses_them(size):
    rank = dist.get_rank()
    size = dist.get_world_size()
    dims, scheme = _scheme("zigzag", num_key_heads=2, num_value_heads=8)
    sections = dims.layout.conv_widths
    weight = torch.arange(float(sum(sections) * 3)).view(-1, 1, 3).requires_grad_()
    columns = [c for c in _columns(dims, rank, size) if c < sum(sections)]
    local = scheme.local_parameter(weight, dims.layout.conv_names)
    assert torch.equal(local, weight[columns])
    local.sum().backward()
    gradient = weight.grad.clone()
    dist.all_reduce(gradient)
    users = torch.zeros(sum(sections))
    for other in range(size):
        users[[c for c in _columns(dims, other, size) if c < sum(sections)]] += 1
    assert users.max() == max(1, size // 2)
    assert torch.equal(gradient, users[:, None, None].expand_as(weight))
    per_head = torch.arange(8.0)
    assert torch.equal(scheme.local_parameter(per_head), per_head.chunk(size)[rank])


class Underway:
    """Messages that travel until somebody has waited for them."""

    def __init__(self, work: dist.Work, all_of_them: list) -> None:
        self.work = work
        self.all_of_them = all_of_them
        all_of_them.append(self)

    def wait(self) -> None:
        self.work.wait()
        self.all_of_them.remove(self)


@directly
@pytest.mark.parametrize("waves", [1, 2])
@on_ranks(2)
def test_copies_leave_room_for_messages_while_some_travel(waves, direct):
    """And only then: a kernel that leaves room leaves multiprocessors idle."""
    underway = []
    found = set()

    def sent(send, *args, **options):
        made = send(*args, **options)
        if isinstance(made, list):
            return [Underway(work, underway) for work in made]
        return [Underway(work, underway) for work in made[0]], made[1]

    def copied(copy, *args, beside_transfer=None, **options):
        assert beside_transfer in (None, bool(underway)), copy
        found.add(beside_transfer)
        return copy(*args, **options)

    names = ("pack_peers", "copy_kept_rows", "move_rows", "unpack_peers")
    pack = SimpleNamespace(
        **{name: partial(copied, getattr(pack_torch, name)) for name in names}
    )
    sends = {
        name: partial(sent, getattr(exchange, name))
        for name in ("_exchange_messages", "_send_fragments")
    }
    _, scheme = _scheme("zigzag")
    mine = torch.randn(8, 2, scheme._projection_shares.width, requires_grad=True)
    with (
        travelling(waves, direct),
        patch.multiple(exchange, _packing_module=lambda gpu: pack, **sends),
    ):
        scheme.passage(None, 16, 2, mine).to_stages(mine).sum().backward()
    assert found == {None, False, True} if waves == 2 else {None, False}


@directly
@pytest.mark.parametrize("adjacent", [True, False])
@on_ranks(2)
def test_rows_are_packed_where_they_lie_unless_their_columns_are_apart(
    adjacent, direct
):
    _, scheme = _scheme("zigzag")
    width = scheme._projection_shares.width
    if adjacent:
        mine = torch.randn(8, 2, 2 * width)[..., :width]
    else:
        mine = torch.randn(8, width, 2).mT
    packed = Mock(wraps=pack_torch.pack_peers)
    with travelling(1, direct), patch.object(pack_torch, "pack_peers", packed):
        scheme.passage(None, 16, 2, mine).to_stages(mine)
    (call,) = packed.call_args_list
    rows = call.args[0]
    same = rows.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
    assert rows.stride(-1) == 1 and same is adjacent


@on_ranks(2)
def test_the_second_derivative_goes_through():
    size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    mine = torch.randn(4, 1, 2 * size, dtype=torch.float64, requires_grad=True)
    out = tensor_a2a_cp2hp(mine, 0, -1, dist.group.WORLD, None, False)
    (grad,) = torch.autograd.grad((out**3).sum(), mine, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), mine)
    torch.testing.assert_close(second, 6 * mine.detach())
