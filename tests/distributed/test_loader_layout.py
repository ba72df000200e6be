"""Without ``cp_layout`` layers read how documents were cut from the loader and the launch."""

import pytest

from tests.distributed import loader_layout_laws as laws
from tests.distributed.loader_layout_laws import BUFFER

CONTIGUOUS = {"cp_partition_mode": "contiguous"}  # of dev's config


@pytest.mark.parametrize(
    ("flags", "cut"),
    [
        ((BUFFER,), "zigzag_buffer"),
        ((BUFFER, "--sft"), "zigzag"),
        (("--sft",), "zigzag"),
        (("--hybrid-context-parallel",), "zigzag_buffer"),
        ((), "zigzag"),
    ],
    ids=["inter-document masking", "masking and sft", "sft", "hybrid cp", "no flag"],
)
def test_layers_follow_the_cut_of_megatrons_own_loader(pools, flags, cut):
    pools(2).run(laws.told, flags, cut)


def test_an_option_that_agrees_with_the_launch_is_taken(pools):
    pools(2).run(laws.told, (BUFFER,), "zigzag_buffer", cp_layout="zigzag_buffer")


@pytest.mark.parametrize("linear_cp_mode", ["headwise", "chunkwise"])
def test_the_partition_mode_of_packed_seq_params_is_followed(pools, linear_cp_mode):
    pools(2).run(laws.told, (), "contiguous", "contiguous", linear_cp_mode=linear_cp_mode)


def test_the_partition_mode_of_the_config_is_followed(pools):
    pools(2).run(laws.told, (), "contiguous", config=CONTIGUOUS)
    pools(2).run(laws.told, (), "contiguous", "contiguous", config=CONTIGUOUS)


def test_micro_batches_of_one_model_may_be_cut_differently(pools):
    pools(2).run(laws.micro_batches_differ)


def test_sources_that_contradict_each_other_are_refused_by_name(pools):
    option, params = "cp_layout='zigzag'", "packed_seq_params.cp_partition_mode="
    by_config = "config.cp_partition_mode='contiguous'"
    cases = {
        (option, BUFFER, "'zigzag_buffer'"): {"cp_layout": "zigzag", "flags": (BUFFER,)},
        (option, f"{params}'contiguous'"): {"cp_layout": "zigzag", "mode": "contiguous"},
        (by_config, f"{params}'zigzag'"): {"config": CONTIGUOUS, "mode": "zigzag"},
        (by_config, "--sft"): {"config": CONTIGUOUS, "flags": ("--sft",)},
        ("cp_partition_mode='striped'", "'contiguous'"): {"mode": "striped"},
    }
    given = {(*names, kind): (kind, case) for names, case in cases.items() for kind in "GM*"}
    for ranks in zip(*pools(2).run(laws.refused, given), strict=True):
        for (*names, kind), said in ranks:
            assert all(name in said for name in names), (kind, names, said)


def test_heads_of_multi_token_prediction_refuse_another_cut_than_zigzag(pools):
    cases = ({"flags": (BUFFER,)}, {"config": CONTIGUOUS}, {"mode": "contiguous"})
    given = {str(case): ("G/G", case) for case in cases}
    for ranks in zip(*pools(2).run(laws.refused, given), strict=True):
        for case, said in ranks:
            assert "shifts the labels" in said, (case, said)
