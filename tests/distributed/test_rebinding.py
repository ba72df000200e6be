"""A built layer follows the process groups it is given: evaluation under another
size."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn import GatedDeltaNet, Mamba2Mixer
from megatron_gdn.mixers.attention import TorchSelfAttention
from tests.distributed.layer_laws import build_layer, over_ranks, thd
from tests.distributed.mixers import BY_NAME, MAMBA2_FP32
from tests.distributed.test_loader_layout import (
    LENGTHS,
    build_model,
    held_by_two,
    one_and_two,
    require_one_ranks_gradients,
)
from tests.parallel import (
    alone,
    assert_close,
    group_of_one,
    groups_of_megatron,
    make_config,
    parallel,
)
from tests.ranks import on_ranks


def groups_of(cp) -> ProcessGroupCollection:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp = cp
    return groups


@contextmanager
def by_hand(model, evaluation, training):
    """What Megatron-Bridge's ``eval_cp_context`` does to our modules, and no more."""

    def install(groups):
        model.config.context_parallel_size = groups.cp.size()
        for module in model.modules():
            if hasattr(module, "pg_collection"):
                module.pg_collection = groups
            if hasattr(module, "cp_group"):
                module.cp_group = groups.cp
            if hasattr(module, "forward") and hasattr(module.forward, "cache_clear"):
                module.forward.cache_clear()

    install(evaluation)
    try:
        yield
    finally:
        install(training)


def rebound_and_back(packed: bool, **options) -> None:
    """A model over two ranks runs on one and over two again: three times one rank's
    gradients."""

    def compare(held):
        require_one_ranks_gradients(model, one, held, thd(LENGTHS) if packed else None)

    with parallel(cp=2):
        one, model = one_and_two(**options)
        mine = held_by_two(lengths=LENGTHS if packed else (sum(LENGTHS),))
        training = groups_of(parallel_state.get_context_parallel_group())
        compare(mine)
        with by_hand(model, groups_of(group_of_one()), training):
            compare(torch.arange(sum(LENGTHS)))
        compare(mine)


@pytest.mark.each_value
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("linear_cp_mode", ["headwise", "chunkwise"])
def test_a_model_over_two_ranks_runs_on_one_and_over_two_again(
    pools, linear_cp_mode, packed
):
    pools(2).run(rebound_and_back, packed, linear_cp_mode=linear_cp_mode)


@on_ranks(cp=2)
def test_the_groups_of_one_forward_hold_for_that_forward():
    """``pg_collection`` of a forward holds for that forward."""
    layer = over_ranks()
    x = torch.randn(sum(LENGTHS), 1, 24)
    mine = held_by_two()
    over_two, _ = layer(x[mine], None, packed_seq_params=thd(LENGTHS))
    alone, _ = layer(
        x, None, packed_seq_params=thd(LENGTHS), pg_collection=groups_of(group_of_one())
    )
    again, _ = layer(x[mine], None, packed_seq_params=thd(LENGTHS))
    assert_close("output", over_two, alone[mine], 1e-5)
    assert torch.equal(over_two, again)


@on_ranks(cp=2)
def test_sizes_under_upstreams_names_follow():
    """Sizes under upstream's names, as Bridge refreshes them on upstream's class."""
    layer = over_ranks()
    two = groups_of_megatron()
    key_columns = 4 * 8
    value_columns = 8 * 12
    assert layer.in_proj_dim == 2 * key_columns + 2 * value_columns + 2 * 8
    both = (2 * key_columns + value_columns, value_columns, 8, 8)
    assert layer.feat_dim_split == tuple(width // 2 for width in both)
    for kind in (
        layer,
        MAMBA2_FP32.build(MAMBA2_FP32.config(context_parallel_size=2), two),
    ):
        assert kind.cp_size == 2
        kind.pg_collection = groups_of(group_of_one())
        kind.cp_size = 1  # as Bridge does next
        assert kind.cp_size == 1
    layer._setup_variant_attrs()
    assert layer.feat_dim_split == both


@on_ranks(tp=2)
def test_a_size_without_its_group_and_other_tensor_ranks_are_refused_by_name():
    layer = over_ranks(linear_cp_mode="headwise")
    x, tp = torch.randn(4, 1, 24), layer.pg_collection.tp
    with pytest.raises(ValueError, match="cp_size=2.*pg_collection"):
        layer.cp_size = 2
    refused = partial(
        pytest.raises, ValueError, match="tensor-parallel group of 1 ranks"
    )
    with refused() as when_set:
        layer.pg_collection = alone()
    with refused() as in_forward:
        layer(x, None, pg_collection=alone())
    assert str(when_set.value) == str(in_forward.value)
    assert layer.pg_collection.tp is tp
    layer(x, None)


@on_ranks(cp=2)
def test_a_group_whose_ranks_cannot_share_the_heads_is_refused_by_name():
    one_head = make_config(linear_num_key_heads=1, linear_num_value_heads=1)
    one_rank = groups_of(group_of_one())
    layer = build_layer(one_head, one_rank, {"linear_cp_mode": "headwise"})
    refused = r"context_parallel_size=2.*linear_cp_mode='chunkwise'"
    with pytest.raises(ValueError, match=refused):
        layer.pg_collection = groups_of(parallel_state.get_context_parallel_group())
    assert layer.cp_size == 1
    layer(torch.randn(4, 1, 24), None)


@pytest.mark.parametrize(
    "change", ["replaced", pytest.param("in place", marks=pytest.mark.slow)]
)
@on_ranks(cp=2)
def test_layers_follow_the_collection_that_they_hold(change):
    """A model that ran over one rank's groups is given two ranks': every gradient is
    one rank's."""
    one, model = one_and_two(cp=1)
    require_one_ranks_gradients(model, one, torch.arange(sum(LENGTHS)), thd(LENGTHS))
    two = parallel_state.get_context_parallel_group()
    for module in model.modules():
        groups = getattr(module, "pg_collection", None)
        if groups is not None and change == "replaced":
            module.pg_collection = groups_of(two)
        elif groups is not None:
            groups.cp = two
    recurrent = [
        m for m in model.modules() if isinstance(m, GatedDeltaNet | Mamba2Mixer)
    ]
    assert [layer.cp_size for layer in recurrent] == [2, 2]
    require_one_ranks_gradients(model, one, held_by_two(), thd(LENGTHS))


@on_ranks(cp=2)
def test_a_layout_that_is_set_later_counts():
    """Every layer of a model is told another cut after it was built."""
    one, model = one_and_two()
    for cut in ("contiguous", "zigzag_buffer", "zigzag"):
        for module in model.modules():
            if hasattr(module, "cp_layout"):
                module.cp_layout = cut
        require_one_ranks_gradients(model, one, held_by_two(cut), thd(LENGTHS))


@on_ranks(cp=2)
def test_attention_between_two_groups_and_heads_in_another_layout_are_refused():
    """Self-attention and its core are given different groups; a head of MTP another
    layout."""
    tokens = torch.arange(12)[None]
    two = parallel_state.get_context_parallel_group()
    model = build_model(cp=1)
    attention = next(m for m in model.modules() if isinstance(m, TorchSelfAttention))
    attention.core_attention.cp_group = two
    with pytest.raises(ValueError) as of_attention:
        model(tokens, tokens, None, labels=tokens)
    said = str(of_attention.value)
    assert "core_attention.cp_group" in said and "pg_collection" in said
    heads = build_model(cp=1, pattern="M/M", cp_layout="contiguous")
    for module in heads.modules():
        if hasattr(module, "cp_group"):
            module.cp_group = two
        if hasattr(module, "pg_collection"):
            module.pg_collection = groups_of(two)
    with pytest.raises(ValueError, match="cp_layout='contiguous' over 2 ranks"):
        heads(tokens, tokens, None, labels=tokens)


@pytest.mark.parametrize("kind", BY_NAME)
@on_ranks(cp=2)
def test_a_collection_of_the_context_parallel_group_alone_is_taken(kind):
    one = ProcessGroupCollection(cp=group_of_one())
    layer = BY_NAME[kind].build(
        BY_NAME[kind].config(context_parallel_size=2), groups_of_megatron()
    )
    x = torch.randn(8, 1, layer.config.hidden_size)
    expected, _ = layer(x, None, pg_collection=groups_of(group_of_one()))
    assert torch.equal(layer(x, None, pg_collection=one)[0], expected)
    layer.pg_collection = one
    assert torch.equal(layer(x, None)[0], expected)


@on_ranks(cp=2)
def test_generation_over_another_number_of_ranks_for_one_forward_is_refused():
    one = groups_of(group_of_one())
    context = StaticInferenceContext(1, 8)
    x = torch.randn(4, 1, 24)
    layer = build_layer(make_config(), one, {})
    call = partial(layer, x, inference_context=context)
    with torch.inference_mode():
        expected, _ = call(pg_collection=one)
        with pytest.raises(NotImplementedError, match="group of 2 ranks for one forw"):
            call(pg_collection=groups_of_megatron())
        assert torch.equal(call()[0], expected)
