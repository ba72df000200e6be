"""Whole models, hybrid ones through Megatron's schedule: every layout takes the same
step."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from tests.distributed import model_laws as laws
from tests.ranks import on_ranks

LAYOUTS = [
    ({"pp": 2}, 2),
    ({"tp": 2, "pp": 2}, 4),
    ({"tp": 2, "cp": 2, "sequence_parallel": True}, 4),
    ({"cp": 2, "pp": 2}, 4),
    ({"tp": 2, "cp": 2, "sequence_parallel": True, "linear_cp_mode": "chunkwise"}, 4),
]
QUICK = [
    (LAYOUTS[0], False),
    (LAYOUTS[0], True),
    (LAYOUTS[2], True),
]
STEPS = [
    pytest.param(
        *layout,
        packed,
        id=f"{layout[0]}-{'packed' if packed else 'batch'}",
        marks=[] if (layout, packed) in QUICK else pytest.mark.slow,
    )
    for layout in LAYOUTS
    for packed in (False, True)
]


@pytest.fixture(scope="module")
def weights(pools, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("weights"))
    pools(1).run(laws.save, folder, 1, 1, {})
    return folder


@pytest.fixture(scope="module")
def one_rank(pools, weights):
    """Loss and squared norms of gradients in fp64, and the largest relative error of
    fp32's."""
    made = {}

    def step(packed: bool):
        if packed not in made:
            exact, rounded = (
                pools(1).run(laws.one_step, weights, dtype, packed=packed)[0]
                for dtype in (torch.float64, torch.float32)
            )
            worst = max(abs(rounded[name] / value - 1) for name, value in exact.items())
            made[packed] = exact, worst
        return made[packed]

    return step


@pytest.mark.each_value
@pytest.mark.parametrize(("layout", "ranks", "packed"), STEPS)
def test_loss_and_gradients_of_a_step_equal_one_rank(
    pools, weights, one_rank, layout, ranks, packed
):
    one, worst_of_fp32 = one_rank(packed)
    stages = pools(ranks).run(
        laws.one_step, weights, torch.float64, packed=packed, **layout
    )
    merged = {}
    for stage in stages:
        merged.update(
            {name: value for name, value in stage.items() if value is not None}
        )
    assert merged.keys() == one.keys()
    # fp64 rounds 2^29 times finer than fp32 and the model magnifies both alike. Eight
    # times that: two runs differ by two such errors, and one error is up to four times
    # another.
    allowed = 8 * 2**-29 * worst_of_fp32
    for name, value in one.items():
        assert merged[name] == pytest.approx(value, rel=allowed, abs=0), name


@on_ranks(cp=2)
def test_megatrons_batch_cutter_gives_a_rank_its_local_indices():
    """Sequence by sequence, and a packed buffer as if it were one sequence."""
    group = parallel_state.get_context_parallel_group()
    tokens = torch.arange(32).view(2, 16)
    offsets = torch.tensor([[0, 3, 16]], dtype=torch.int32)
    cut = get_batch_on_this_cp_rank({"tokens": tokens, "cu_seqlens": None}, False)
    held = local_indices((16,), 2, group.rank())
    assert torch.equal(cut["tokens"], tokens[:, held])
    batch = {"tokens": tokens[:1], "cu_seqlens": offsets}
    cut = get_batch_on_this_cp_rank(batch, False, use_per_sequence_balancing=True)
    held = local_indices((3, 13), 2, group.rank(), SequenceLayout.ZIGZAG_BUFFER)
    assert torch.equal(cut["tokens"], tokens[:1, held])
