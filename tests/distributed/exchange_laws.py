"""Run on every rank: the all-to-all helpers against what they are documented to do."""

import warnings

import torch
import torch.distributed as dist

from megatron_gdn import get_parameter_local_cp, tensor_a2a_cp2hp, tensor_a2a_hp2cp
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.init import take_share

SECTIONS = (8, 4, 12)


def cp2hp_gives_all_tokens_of_a_share_of_every_section(balanced: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.randn(4 * size, 3, sum(SECTIONS), dtype=torch.float64)
    weight = torch.randn(4 * size, 3, sum(SECTIONS) // size, dtype=torch.float64)
    held = (
        local_indices([4 * size], size, rank)
        if balanced
        else torch.arange(4 * size).chunk(size)[rank]
    )
    mine = whole[held].requires_grad_()
    received = tensor_a2a_cp2hp(mine, 0, -1, dist.group.WORLD, SECTIONS, balanced)
    assert torch.equal(received, take_share(whole, 2, SECTIONS, rank, size))

    # The gradient of an exchange is the exchange of gradients: every rank's weight comes back.
    (received * weight).sum().backward()
    expected = torch.empty_like(whole)
    for section, start in zip(SECTIONS, (0, 8, 12), strict=True):
        share, at = (
            section // size,
            sum(s // size for s in SECTIONS if SECTIONS.index(s) < SECTIONS.index(section)),
        )
        for other in range(size):
            columns = slice(start + other * share, start + (other + 1) * share)
            expected[..., columns] = weight[..., at : at + share]
    assert torch.equal(mine.grad, expected[held])


def hp2cp_is_the_inverse_of_cp2hp(sections) -> None:
    size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    mine = torch.randn(4, 2, sum(SECTIONS), dtype=torch.float64, requires_grad=True)
    there = tensor_a2a_cp2hp(mine, 0, 2, dist.group.WORLD, sections)
    assert there.shape == (4 * size, 2, sum(SECTIONS) // size)
    back = tensor_a2a_hp2cp(there, 0, 2, dist.group.WORLD, sections)
    assert torch.equal(back, mine)
    weight = torch.randn_like(back)
    (back * weight).sum().backward()
    assert torch.equal(mine.grad, weight)


def parameter_shares_rebuild_the_parameter_and_its_gradient() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(float(sum(SECTIONS) * 2)).view(-1, 2).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # upstream indexes with a list of slices, which torch warns of
        share = get_parameter_local_cp(whole, 0, dist.group.WORLD, SECTIONS)
    assert torch.equal(share, take_share(whole, 0, SECTIONS, rank, size))
    share.sum().backward()
    gradient = whole.grad.clone()
    dist.all_reduce(gradient)
    assert torch.equal(gradient, torch.ones_like(whole))
    plain = get_parameter_local_cp(whole, 0, dist.group.WORLD)
    assert plain.data_ptr() == whole.chunk(size)[rank].data_ptr()


def bad_exchanges_are_refused() -> None:
    group = dist.group.WORLD
    for call, message in (
        (lambda: tensor_a2a_cp2hp(torch.zeros(4, 8), 0, -1, group), "seq_dim=0 and head_dim=-1"),
        (lambda: tensor_a2a_cp2hp(torch.zeros(4, 1, 8), 1, -1, group), "seq_dim=1"),
        (lambda: tensor_a2a_cp2hp(torch.zeros(4, 1, 7), 0, -1, group), "each be a multiple"),
        (
            lambda: tensor_a2a_cp2hp(torch.zeros(4, 1, 8), 0, -1, group, (4, 2)),
            "add up to the width",
        ),
        (lambda: tensor_a2a_cp2hp(torch.zeros(3, 1, 8), 0, -1, group), "not a multiple of"),
        (lambda: tensor_a2a_hp2cp(torch.zeros(5, 1, 8), 0, -1, group), "cannot be shared"),
        (lambda: get_parameter_local_cp(torch.zeros(7), 0, group), "each be a multiple"),
    ):
        try:
            call()
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"accepted: {message}")
