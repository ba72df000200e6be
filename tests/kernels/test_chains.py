"""The kernel that follows chains of affine maps against its plain-torch twin in
fp64."""

import pytest
import torch

from megatron_gdn.context_parallel.chunkwise.map_exchange import StatePaths, _steps_of
from megatron_gdn.ops.state_maps import chains_kernels
from megatron_gdn.ops.state_maps.state_map import (
    NO_INDEX,
    ChainSteps,
    follow_chains_in_torch,
)
from tests.ops.delta_rule.states import segments_at

CHAINS = {
    "one of one": [[(NO_INDEX, 0), (0, NO_INDEX)]],
    "what enters": [[(0, 2), (3, 0), (1, 1), (2, NO_INDEX)]],
    "unequal": [
        [(0, 0), (1, NO_INDEX)],
        [(2, 4), (3, 3), (4, 1), (5, 2), (6, NO_INDEX)],
        [(7, NO_INDEX)],
    ],
    "what leaves": [
        [(NO_INDEX, 2), (NO_INDEX, 1), (0, NO_INDEX)],
        [(NO_INDEX, 3), (1, NO_INDEX)],
    ],
}
# H, K, V: columns that fill no tile, and maps whose two segments share one.
SIZES = [(1, 16, 5), (3, 32, 40), (2, 16, 32), (1, 24, 40), (1, 5, 7)]


def in_one_launch(local, through, steps, out, start, cuts=None, compose=False):
    return chains_kernels.follow_chains_on_gpu(
        local, through, steps.table, out, start, cuts, compose
    )


def case(chains, sizes, device):
    """Maps that lie apart in memory, as those of a gather do."""
    H, K, V = sizes
    steps = ChainSteps.build(chains, device)
    pairs = [pair for chain in chains for pair in chain]
    P, Q = (1 + max(pair[i] for pair in pairs) for i in (1, 0))
    make = torch.Generator().manual_seed(len(pairs))
    maps = torch.randn(max(P, 1), H, K, V + K, generator=make) / K**0.5
    start = torch.randn(len(chains), H, K, V, generator=make)
    return steps, maps.to(device), start.to(device), Q


def both(steps, local, through, Q, start, cuts=None, compose=False):
    """The kernel's states and the exact ones; those that no step writes stay NaN."""
    K, V = local.shape[2:]
    X = V + K if compose else V
    out = local.new_full((Q, local.shape[1], K, X), float("nan"))
    in_one_launch(local, through, steps, out, start, cuts, compose)
    exact = torch.full_like(out, float("nan"), dtype=torch.float64)
    wide = None if start is None else start.double()
    follow_chains_in_torch(
        local.double(), through.double(), steps, exact, wide, cuts, compose
    )
    return out, exact


def cuts_at(steps, nodes, device):
    cut = [j in steps for j in range(nodes)]
    return torch.tensor(cut, dtype=torch.int32, device=device)


def assert_fp32(got, exact, steps):
    """Both factors of a product are off by 2^-20 at most, in every product of a
    chain."""
    longest = max(len(chain) for chain in steps.chains)
    tolerance = {
        "rtol": 0,
        "atol": 2 * longest * 2.0**-20 * exact.nan_to_num().abs().max().item(),
    }
    torch.testing.assert_close(got.double(), exact, equal_nan=True, **tolerance)


@pytest.mark.each_pair
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("chains", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("given", [True, False])
def test_states_are_the_twins(chains, sizes, given, device):
    steps, maps, start, Q = case(chains, sizes, device)
    local, through = maps.split([sizes[2], sizes[1]], dim=-1)
    for matrix in (through, through.mT):
        assert_fp32(*both(steps, local, matrix, Q, start if given else None), steps)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_maps_are_the_twins(sizes, device):
    chains = [
        [(NO_INDEX, 1), (NO_INDEX, 0), (NO_INDEX, 3), (1, NO_INDEX)],
        [(NO_INDEX, 2), (0, NO_INDEX)],
    ]
    steps, maps, _, Q = case(chains, sizes, device)
    local, through = (x.contiguous() for x in maps.split([sizes[2], sizes[1]], dim=-1))
    got, exact = both(steps, local, through, Q, None, compose=True)
    assert_fp32(got, exact, steps)
    assert torch.equal(got[0], maps[2]), "one map alone is handed on as it is"


def test_what_no_chain_reads_may_be_anything(device):
    segments = segments_at([0, 64, 192], [0, 64, 128, 192], device)
    H, K, V = SIZES[1]
    _, maps, start, _ = case(CHAINS["what enters"], SIZES[1], device)
    maps[2], start = float("nan"), start.expand(2, H, K, V).contiguous()
    local, through = maps[:3].split([V, K], dim=-1)
    got, exact = both(segments.to_entering_states, local, through, 3, start)
    assert exact.isfinite().all()
    assert_fp32(got, exact, segments.to_entering_states)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_nothing_of_the_maps_before_a_cut_comes_after_it(cut, device):
    """A node that lets nothing through, of four whose maps lie in another order."""
    H, K, V = SIZES[1]
    places = [2, 0, 1, 3]
    pairs = [(j, j) for j in places[:-1]] + [(places[-1], NO_INDEX)]
    steps = ChainSteps.build([pairs], device)
    cuts = cuts_at({cut}, 4, device)
    maps = torch.randn(4, H, K, V + K, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    local, through = maps.split([V, K], dim=-1)
    through[places[cut]] = 0

    def states(follow, cuts):
        out = torch.full_like(
            local, float("nan"), memory_format=torch.contiguous_format
        )
        return follow(local, through, steps, out, None, cuts)

    runs = (in_one_launch, follow_chains_in_torch)
    uncut = [states(follow, None) for follow in runs]
    clean = [states(follow, cuts) for follow in runs]
    for x, y in zip(clean, uncut, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    maps[places[:cut]] = float("nan")
    after = places[cut + 1 :]
    for follow, before in zip(runs, clean, strict=True):
        assert torch.equal(states(follow, cuts)[after], before[after])


# Nodes of four ranks: in zigzag; states that pass some nodes of a buffer; fixed
# buffers, where the device knows the nodes that no state passes.
UP_AND_DOWN = (0, 1, 2, 3, 3, 2, 1, 0)
PATHS = {
    "whole": (StatePaths(UP_AND_DOWN, (tuple(range(8)),)), ()),
    "apart": (StatePaths((0, 1, 2, 3, 2, 1, 0), ((0, 1, 2), (3, 4), (4, 5, 6))), ()),
    "cut": (StatePaths((0, 1, 2, 3), ((0, 1, 2, 3),)), (2,)),
}


@pytest.mark.parametrize(("paths", "cuts"), PATHS.values(), ids=PATHS)
def test_states_along_paths_are_the_twins(paths, cuts, device):
    """Maps lie by sender, states by receiver."""
    H, K, V = SIZES[1]
    P = len(paths.sending_nodes)
    make = torch.Generator().manual_seed(0)
    links = torch.randn(P, H, K, V + K, generator=make).to(device) / K**0.5
    steps = _steps_of(paths, 4, links.device)
    flags = cuts_at(cuts, 4, links.device) if cuts else None
    local, through = links.split([V, K], dim=-1)
    got, exact = both(steps, local, through, len(paths.receiving_nodes), None, flags)
    assert exact.isfinite().all(), "every node that a state enters gets one"
    assert_fp32(got, exact, steps)


def test_a_state_does_not_depend_on_the_columns_and_chains_beside_it(device):
    steps, maps, start, Q = case(CHAINS["unequal"], SIZES[1], device)
    H, K, V = SIZES[1]
    local, through = maps.split([V, K], dim=-1)
    whole = both(steps, local, through, Q, start)[0]
    alone = ChainSteps.build(CHAINS["unequal"][1:2], device)
    narrow = both(alone, local[..., :7], through, Q, start[1:2, :, :, :7].contiguous())[
        0
    ]
    assert torch.equal(narrow[2:7], whole[2:7, ..., :7])


def test_any_number_of_chains_is_counted_by_a_grid(device, monkeypatch):
    """Of its three axes the last two count to 65535, and documents that are cut may be
    more."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(chains_kernels, "_follow_kernel", Kernel())
    n = 70_000
    H, K, V = SIZES[0]
    steps = ChainSteps.build([[(0, NO_INDEX)]] * n, device)
    state = torch.zeros(1, H, K, V, device=device)
    in_one_launch(state, torch.zeros(1, H, K, K, device=device), steps, state, None)
    (grid,) = launched
    assert grid[0] == n and max(grid[1:]) <= 65535


def test_heads_of_128_are_followed_in_fp32(device):
    """The size that matters, over a chain of 16 maps, by the same measure."""
    H = 2
    K = 128
    V = 128
    n = 16
    steps = ChainSteps.build(
        [[*((j, j) for j in range(n - 1)), (n - 1, NO_INDEX)]], device
    )
    make = torch.Generator().manual_seed(0)
    local, through = (
        torch.randn(n, H, K, x, generator=make).to(device) for x in (V, K)
    )
    through /= K**0.5
    got, exact = both(steps, local, through, n, None)
    plain = torch.empty_like(got)
    follow_chains_in_torch(local, through, steps, plain, None)
    off, plain_off = ((x.double() - exact).norm() / exact.norm() for x in (got, plain))
    print(f"kernel {off:.1e}, fp32 products {plain_off:.1e}")
    assert off < 2 * n * 2.0**-20  # one TF32 factor would be off by 2^-11
