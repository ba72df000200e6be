"""On two and four GPUs over nccl in bf16: TP and CP are as exact as one rank."""

import pytest

from tests.gpu import graph_laws
from tests.gpu import parallel_laws as laws

pytestmark = pytest.mark.gpu

# The cut of every document into twice as many pieces as there are ranks leaves pieces
# of one token.
LENGTHS = (64, 192, 8, 248)
BATCH_AND_PACKED = pytest.mark.parametrize(
    "lengths", [None, LENGTHS], ids=["batch", "packed"]
)


def as_exact_as_one(pool, *case, **options):
    """Two draws of the same error: 1.2, with the spread of few numbers, and one
    rounding more.

    Ranks round their part of a sum to bf16 before the parts are added (2^-9 of the sum
    at most, in quadrature to the error that one rank has).
    """
    for answer in pool.run(laws.errors_of_one_rank_and_of_all, *case, **options):
        ran, fastest = answer["backend"]
        assert ran == fastest
        for name, (parallel, one, numbers) in answer["errors"].items():
            print(f"{name}: all ranks {parallel:.2e} one rank {one:.2e} of {numbers}")
            spread = 1.2 * (1 + 2 / numbers**0.5)
            assert parallel <= spread * (one**2 + 2**-18) ** 0.5, name


TWO = [(1, 2, False, "headwise"), (1, 2, False, "chunkwise")]
SPLITS = [
    (2, 1, False, "auto"),
    (2, 1, True, "auto"),
    *TWO,
    (2, 2, True, "headwise"),
    (2, 2, True, "chunkwise"),
    (1, 4, False, "headwise"),
    (1, 4, False, "chunkwise"),
]
CASES = [
    *((*split, {}) for split in SPLITS),
    *((*split, {"mixer": "mamba2"}) for split in ((2, 1, True, "auto"), *TWO)),
    *((*split, {"rule_operands": "bf16"}) for split in TWO),
]


@BATCH_AND_PACKED
@pytest.mark.parametrize(("tp", "cp", "sp", "mode", "options"), CASES, ids=str)
def test_all_ranks_are_as_exact_as_one(gpus, tp, cp, sp, mode, options, lengths):
    as_exact_as_one(gpus(tp * cp), tp, cp, sp, lengths, mode=mode, **options)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["zigzag_buffer", "contiguous"])
def test_chunkwise_in_whole_buffer_layouts_is_as_exact_as_one_rank(gpus, layout, ranks):
    lengths = (3, 190, 1, 0, 130, 188)
    as_exact_as_one(
        gpus(ranks), 1, ranks, False, lengths, mode="chunkwise", layout=layout
    )


@BATCH_AND_PACKED
@pytest.mark.parametrize("ranks", [2, 4])
def test_chunkwise_repeats_bitwise_in_deterministic_mode(gpus, ranks, lengths):
    assert all(gpus(ranks).run(laws.chunkwise_repeats_bitwise, lengths))


@BATCH_AND_PACKED
@pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
def test_chunkwise_waits_for_nothing(gpus, lengths, layout):
    gpus(2).run(laws.chunkwise_waits_for_nothing, lengths, layout)


# as the laws above have
FEW_HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
modes = pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
deterministic = pytest.mark.parametrize(
    "deterministic", [False, True], ids=["", "deterministic"]
)


@modes
@deterministic
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_graph_over_all_ranks_replays_eager_bits(gpus, ranks, mode, deterministic):
    changes = {**FEW_HEADS, "deterministic_mode": deterministic}
    options = {"linear_cp_mode": mode}
    gpus(ranks).run(
        graph_laws.a_dense_graph_replays_eager_bits, ranks, options=options, **changes
    )


@deterministic
@pytest.mark.parametrize(
    ("mode", "layout"),
    [("headwise", "zigzag"), ("headwise", "zigzag_buffer"), ("chunkwise", "zigzag")],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_sets_of_documents_in_one_graph_over_all_ranks(
    gpus, ranks, mode, layout, deterministic
):
    changes = {**FEW_HEADS, "deterministic_mode": deterministic}
    gpus(ranks).run(
        graph_laws.a_packed_graph_replays_eager_bits,
        ranks,
        layout,
        as_ordinary=deterministic and mode == "headwise",
        options={"linear_cp_mode": mode},
        **changes,
    )


@modes
def test_ten_sets_of_documents_in_megatrons_local_graphs_over_two_ranks(gpus, mode):
    run = graph_laws.megatrons_local_graphs_give_eager_bits
    gpus(2).run(run, (), cp=2, packed=True, mode=mode)
