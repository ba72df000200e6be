"""Our Mamba2 mixer and the adapter beside Megatron's MambaMixer and transformers' mixers."""

import pytest

from tests.distributed.upstream_mamba_laws import (
    adapter_equals_the_mixer,
    checkpoints_of_megatrons,
    equals_megatrons,
    equals_transformers,
    exchange_and_refusals,
    one_message_each_way,
)


def test_the_mixer_equals_megatrons_with_the_same_weights(pools):
    pools(2).run(equals_megatrons)


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoints_of_megatrons_mixer_load_and_save_under_its_keys(pools, tp):
    pools(tp).run(checkpoints_of_megatrons, tp)


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
def test_weights_of_transformers_give_its_outputs_and_come_back_bit_for_bit(pools, kind):
    pytest.importorskip("transformers")
    pools(2).run(equals_transformers, kind)


@pytest.mark.parametrize(("cp", "groups"), [(2, 1), (4, 2), (4, 8)])
def test_the_exchange_is_its_definition_and_refuses_what_it_would_cut_wrong(pools, cp, groups):
    pytest.importorskip("transformers")
    pools(cp).run(exchange_and_refusals, cp, groups)


@pytest.mark.parametrize("groups", [1, 2])
def test_all_sections_travel_in_one_message_each_way(pools, groups):
    pytest.importorskip("transformers")
    pools(2).run(one_message_each_way, 2, groups)


@pytest.mark.parametrize(
    ("kind", "cp", "groups", "lengths"),
    [
        ("mamba2", 2, 2, None),
        ("mamba2", 2, 1, (8, 0, 20, 4)),
        ("megatron", 2, 2, (8, 0, 20, 4)),
        ("mamba2", 4, 2, (8, 0, 24, 16)),
        ("megatron", 4, 4, None),
    ],
)
def test_the_adapter_around_anothers_mixer_equals_its_own_forward(pools, kind, cp, groups, lengths):
    if kind != "megatron":
        pytest.importorskip("transformers")
    pools(cp).run(adapter_equals_the_mixer, kind, cp, groups, lengths)
