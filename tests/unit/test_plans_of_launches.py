"""Plans of kernels' launches: how many are kept, and how many rows a tile has."""

from importlib import import_module
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from megatron_gdn.context_parallel.headwise import pack
from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.elementwise import largest_A_log, least_log_decay
from megatron_gdn.ops.front import launches
from megatron_gdn.ops.front.launches import TritonFront
from megatron_gdn.ops.generation import step_kernels
from megatron_gdn.ops.kernels import elementwise, reduce
from megatron_gdn.ops.kernels.launch import LAUNCH_CACHE_SIZE
from megatron_gdn.ops.kernels.tiles import MOST_PROGRAMS, FrontTile
from megatron_gdn.ops.readout import kernels as readout_kernels
from megatron_gdn.ops.readout.kernels import TritonReadout

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


class Strip(NamedTuple):
    block_width: int


STRIP = Strip(8)


@pytest.mark.parametrize(
    ("tokens", "messages", "strips"), [(0, 2, (STRIP,)), (3, 0, (STRIP,)), (3, 2, ())]
)
def test_a_copy_of_nothing_launches_nothing(tokens, messages, strips, monkeypatch):
    """CUDA refuses a grid without programs."""
    monkeypatch.setattr(pack, "_copy_launch", None)
    rows = torch.zeros(tokens, 1, 4)
    pack._launch_copy(
        rows,
        rows,
        None,
        strips,
        message_count=messages,
        pack=True,
        beside_transfer=False,
    )


def test_a_dimension_of_one_element_has_no_stride():
    """So rows of one token take the launch of all rows that are aligned as they are."""
    rows = torch.zeros(5, 1, 8).as_strided((1, 3, 8), (7, 8, 1))
    assert pack._strides_of(rows) == (0, 1, 8)


def test_a_large_batch_has_small_tiles_by_its_rows():
    """Tokens times batch rows, not one of the two, make a tile large."""
    tiles = {}
    for tokens, batch in ((4096, 1), (64, 64), (63, 65)):
        launch = pack._copy_launch(
            tokens,
            batch,
            pack._RowStrides(1, 1, 8),
            2,
            torch.device("cpu"),
            (Strip(1024),),
            8,
            1,
            0,
            1,
            False,
            False,
            True,
            False,
        )
        tiles[tokens, batch] = launch._constants["ROWS"]
    assert tiles[4096, 1] == tiles[64, 64] > tiles[63, 65]


def test_more_rows_than_32_bits_count_are_refused():
    with pytest.raises(ValueError, match="the number of rows of partial sums"):
        reduce._stages_of_sum(2**31 - 8, 1, (1,))


@pytest.mark.parametrize("rows", [1, 9, 256, 257, 16_384, 2**24 + 1, 2**31 - 2**16])
def test_each_row_of_a_sum_has_a_program_and_no_program_is_without_rows(rows):
    for stage in reduce._stages_of_sum(rows, 5, (5,)):
        constants = stage.launch._constants
        of_program = constants["ROWS"] * constants["REPEATS"]
        assert stage.rows_written == stage.launch._grid_axes[1]
        assert stage.rows_written == -(-rows // of_program)
        assert stage.launch._numbers[0] == rows
        rows = stage.rows_written
    assert rows == 1


def test_a_head_of_a_decoding_step_is_convolved_by_one_warp():
    """Its lanes load the history before one of them overwrites it."""
    front = TritonFront(gdn_table(HeadSizes(2, 4, 8, 6).layout))
    convolution, _ = step_kernels._step_launches(
        front, 3, 80, 4, 3, False, 0, False, False, (1, 1), None
    )
    assert convolution._constants["num_warps"] == 1


@pytest.mark.parametrize("groups", [None, 3])
def test_every_row_of_every_group_has_a_program(groups):
    readout = TritonReadout(slice(0, 24), groups=groups)
    launch = readout_kernels._forward_launch(readout, 1000, 1, 3, 8, (24, 24), (24, 24))
    assert launch._grid_axes[0] * launch._constants["ROWS"] >= 1000 * 3


def test_a_long_sequence_has_fewer_tiles_than_a_grid_takes():
    front = TritonFront(gdn_table(HeadSizes(1, 1, 16, 16).layout))
    S = 2**25
    launch = launches._forward_launch(
        front, S, 1, 4, (50, 50), (50, 50), (True,) * 5, False, False, False, False
    )
    assert launch._grid_axes[1] <= MOST_PROGRAMS


def test_a_front_with_a_tile_of_its_own_takes_it_in_both_directions():
    """So do the laws of small tiles hold."""
    tile = FrontTile(rows=16, steps=8, warps=2, stages=2)
    front = TritonFront(gdn_table(HeadSizes(1, 1, 16, 16).layout), tile=tile)
    strides = (50, 50) * 2
    plan = launches._backward_plan(
        front, 640, 1, 4, strides * 2, (1,) * 5, (2, 2), *(False,) * 5
    )
    forward = launches._forward_launch(
        front, 640, 1, 4, *((50, 50),) * 2, (True,) * 5, *(False,) * 4
    )
    for launch in (plan.launch, forward):
        wanted = {"ROWS": 16, "STAGES": 2, "num_warps": 2}
        assert launch._constants.items() >= wanted.items()
        assert launch._grid_axes[1] == 5 and launch._numbers[1] == 8


def test_limits_of_gates_in_kernels_are_those_of_fp32():
    assert elementwise.LARGEST_A_LOG.value == largest_A_log(torch.float32)
    assert elementwise.LEAST_LOG_DECAY.value == least_log_decay(torch.float32)


def test_the_two_instructions_of_a_gpus_sigmoid_give_the_sigmoid(monkeypatch):
    instructions = {
        ("ex2.approx.ftz.f32 $0, $1;", "=f,f"): torch.exp2,
        ("rcp.approx.ftz.f32 $0, $1;", "=f,f"): torch.reciprocal,
    }

    def run(text, registers, arguments, **_):
        return instructions[text, registers](*arguments)

    triton_language = SimpleNamespace(inline_asm_elementwise=run, float32=torch.float32)
    monkeypatch.setattr(elementwise, "tl", triton_language)
    monkeypatch.setattr(elementwise, "_CAN_RUN_PTX", True)
    factor = elementwise._MINUS_LOG2_E.value
    monkeypatch.setattr(elementwise, "_MINUS_LOG2_E", factor)
    x = torch.linspace(-100, 100, 401)
    torch.testing.assert_close(elementwise.sigmoid.fn(x), x.sigmoid())
