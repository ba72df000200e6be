"""Run on every rank: built layers that are given other process groups."""

from collections.abc import Callable
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.context_parallel import SequenceLayout, local_indices
from megatron_gdn.mixers.attention.self_attention import TorchSelfAttention
from megatron_gdn.specs import gated_delta_net_spec
from tests.distributed.bridge import eval_cp_context
from tests.distributed.layer_laws import thd
from tests.distributed.loader_layout_laws import (
    LENGTHS,
    build_model,
    require_one_ranks_gradients,
)
from tests.mamba_mixers import build as build_mamba
from tests.mamba_mixers import mamba_config
from tests.parallel import assert_close, group_of_one, make_config, parallel


def groups_of(cp) -> ProcessGroupCollection:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp = cp
    return groups


def held_by_two(lengths: tuple[int, ...]) -> torch.Tensor:
    return local_indices(lengths, 2, parallel_state.get_context_parallel_rank())


@contextmanager
def by_hand(model, evaluation, training):
    """What Bridge's function does to our modules, and no more."""

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


def rebound_and_back(bridge: str | None = None, packed: bool = True, **options) -> None:
    """A model over two ranks runs on one and over two again: three times one rank's gradients."""
    rebinding = by_hand if bridge is None else eval_cp_context(bridge)

    def compare(held):
        require_one_ranks_gradients(model, one, held, thd(LENGTHS) if packed else None)

    with parallel(cp=2):
        one, model = build_model(cp=1), build_model(cp=2, **options)
        model.load_state_dict(one.state_dict())
        mine = held_by_two(LENGTHS if packed else (sum(LENGTHS),))
        training = groups_of(parallel_state.get_context_parallel_group())
        compare(mine)
        with rebinding(model, groups_of(group_of_one()), training):
            compare(torch.arange(sum(LENGTHS)))
        compare(mine)


def groups_of_one_forward() -> None:
    """``pg_collection`` of a forward holds for that forward."""
    with parallel(cp=2):
        layer = build_module(
            gated_delta_net_spec("local"), make_config(context_parallel_size=2),
            pg_collection=groups_of(parallel_state.get_context_parallel_group()),
        )  # fmt: skip
        x = torch.randn(sum(LENGTHS), 1, 24)
        mine = held_by_two(LENGTHS)
        over_two, _ = layer(x[mine], None, packed_seq_params=thd(LENGTHS))
        alone, _ = layer(
            x, None, packed_seq_params=thd(LENGTHS), pg_collection=groups_of(group_of_one())
        )
        again, _ = layer(x[mine], None, packed_seq_params=thd(LENGTHS))
        assert_close("output", over_two, alone[mine], 1e-5)
        assert torch.equal(over_two, again)


def names_follow_the_group() -> None:
    """Sizes under upstream's names, as Bridge refreshes them on upstream's class."""
    with parallel(cp=2):
        config = make_config(context_parallel_size=2)
        two = groups_of(parallel_state.get_context_parallel_group())
        layer = build_module(gated_delta_net_spec("local"), config, pg_collection=two)
        key_columns, value_columns = 4 * 8, 8 * 12
        assert layer.in_proj_dim == 2 * key_columns + 2 * value_columns + 2 * 8
        both = (2 * key_columns + value_columns, value_columns, 8, 8)
        assert layer.feat_dim_split == tuple(width // 2 for width in both)
        for kind in (layer, build_mamba(mamba_config(context_parallel_size=2), two)):
            assert kind.cp_size == 2
            kind.pg_collection = groups_of(group_of_one())
            kind.cp_size = 1  # as Bridge does next
            assert kind.cp_size == 1
        layer._setup_variant_attrs()
        assert layer.feat_dim_split == both


def refusals() -> list[str]:
    """What is said to a size without its group, to other tensor ranks, to heads that do not fit."""
    said = []

    def record(action: Callable) -> None:
        try:
            action()
        except ValueError as error:
            said.append(str(error))

    with parallel(tp=2):
        tp = parallel_state.get_tensor_model_parallel_group()
        config = make_config(tensor_model_parallel_size=2)
        layer = build_module(
            gated_delta_net_spec("local", linear_cp_mode="headwise"), config,
            pg_collection=ProcessGroupCollection(tp=tp, cp=group_of_one()),
        )  # fmt: skip
        x = torch.randn(4, 1, 24)
        record(lambda: setattr(layer, "cp_size", 2))
        other = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        record(lambda: setattr(layer, "pg_collection", other))
        record(lambda: layer(x, None, pg_collection=other))
        assert layer.pg_collection.tp is tp
        layer(x, None)
    with parallel(cp=2):
        layer = build_module(
            gated_delta_net_spec("local", linear_cp_mode="headwise"),
            make_config(linear_num_key_heads=1, linear_num_value_heads=1),
            pg_collection=groups_of(group_of_one()),
        )
        two = groups_of(parallel_state.get_context_parallel_group())
        record(lambda: setattr(layer, "pg_collection", two))
        assert layer.cp_size == 1
        layer(x, None)
    return said


def groups_changed_in_place() -> None:
    """The collection that a layer holds is given another context-parallel group."""
    with parallel(cp=2):
        groups = groups_of(parallel_state.get_context_parallel_group())
        layers = {
            24: build_module(gated_delta_net_spec("local"), make_config(), pg_collection=groups),
            20: build_mamba(mamba_config(), groups),
        }
        mine = held_by_two(LENGTHS)
        for width, layer in layers.items():
            x = torch.randn(sum(LENGTHS), 1, width)
            groups.cp = parallel_state.get_context_parallel_group()
            over_two, _ = layer(x[mine], packed_seq_params=thd(LENGTHS))
            groups.cp = group_of_one()
            assert layer.cp_size == 1
            alone, _ = layer(x, packed_seq_params=thd(LENGTHS))
            assert_close("output", alone[mine], over_two, 1e-5)


def attention_follows_its_collection(change: str) -> None:
    """A model over one rank's groups is given two ranks': every gradient is one rank's."""
    with parallel(cp=2):
        one, model = build_model(cp=1), build_model(cp=1)
        model.load_state_dict(one.state_dict())
        two = parallel_state.get_context_parallel_group()
        for module in model.modules():
            groups = getattr(module, "pg_collection", None)
            if groups is not None and change == "replaced":
                module.pg_collection = groups_of(two)
            elif groups is not None:
                groups.cp = two
        require_one_ranks_gradients(model, one, held_by_two(LENGTHS), thd(LENGTHS))


def layout_set_later() -> None:
    """Every layer of a model is told another cut after it was built."""
    with parallel(cp=2):
        one, model = build_model(cp=1), build_model(cp=2)
        model.load_state_dict(one.state_dict())
        rank = parallel_state.get_context_parallel_rank()
        for cut in ("contiguous", "zigzag_buffer", "zigzag"):
            for module in model.modules():
                if hasattr(module, "cp_layout"):
                    module.cp_layout = cut
            held = local_indices(LENGTHS, 2, rank, SequenceLayout(cut))
            require_one_ranks_gradients(model, one, held, thd(LENGTHS))


def attention_of_two_groups() -> list[str]:
    """Self-attention and its core are given different groups; a head of MTP another layout."""
    said = []
    with parallel(cp=2):
        model = build_model(cp=1)
        attention = next(m for m in model.modules() if isinstance(m, TorchSelfAttention))
        attention.core_attention.cp_group = parallel_state.get_context_parallel_group()
        tokens = torch.arange(12)[None]
        try:
            model(tokens, tokens, None, labels=tokens)
        except ValueError as error:
            said.append(str(error))
        heads = build_model(cp=1, pattern="M/M", cp_layout="contiguous")
        for module in heads.modules():
            if hasattr(module, "cp_group"):
                module.cp_group = parallel_state.get_context_parallel_group()
            if hasattr(module, "pg_collection"):
                module.pg_collection = groups_of(parallel_state.get_context_parallel_group())
        try:
            heads(tokens, tokens, None, labels=tokens)
        except ValueError as error:
            said.append(str(error))
    return said
