"""Plans of kernels' launches: how many are kept, and how many rows a tile has."""

from importlib import import_module
from types import SimpleNamespace

import pytest

from megatron_gdn.context_parallel.headwise import pack
from megatron_gdn.ops.kernels.launch import LAUNCH_CACHE_SIZE

WITH_PLANS = (
    "context_parallel.headwise.pack",
    "gdn.half_kernels",
    "ops.front.history_kernels",
    "ops.front.launches",
    "ops.generation.step_kernels",
    "ops.kernels.reduce",
    "ops.readout.kernels",
    "ops.state_maps.chains_kernels",
)


@pytest.mark.parametrize("name", WITH_PLANS)
def test_as_many_plans_are_kept_as_is_said(name):
    known = vars(import_module(f"megatron_gdn.{name}"))
    caches = [x for x in known.values() if hasattr(x, "cache_parameters")]
    own = [x for x in caches if x.__module__ == f"megatron_gdn.{name}"]
    sizes = {x.cache_parameters()["maxsize"] for x in own}
    assert LAUNCH_CACHE_SIZE in sizes and sizes <= {LAUNCH_CACHE_SIZE, None}


@pytest.mark.parametrize(("rows", "share"), [(4095, 4), (4096, 1)])
@pytest.mark.parametrize("widest", [1, 8, 1024, 1 << 20])
def test_a_tile_has_as_many_rows_as_its_bytes_allow(rows, share, widest):
    strips = (SimpleNamespace(block_width=widest), SimpleNamespace(block_width=1))
    tile = pack._rows_per_tile(rows, 2, strips)
    fit = pack._TILE_BYTES // share // (2 * widest)
    assert tile == min(max(fit, 1), 128)
