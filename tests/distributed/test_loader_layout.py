"""Without ``cp_layout`` layers read how documents were cut from the loader and the
launch."""

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn import SequenceLayout
from megatron_gdn.compat.observe import log_once
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.loader_layout import (
    LoaderLayout,
    _layout_of_sources,
    launch_arguments,
)
from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import build_layer, thd
from tests.parallel import (
    VOCABULARY,
    alone,
    assert_close,
    group_of_one,
    hybrid_model,
    make_config,
    model_config,
    parallel,
)
from tests.ranks import on_ranks

CONTIGUOUS = {"cp_partition_mode": "contiguous"}  # of dev's config
BY_PARAMS = {"mode": "contiguous"}
BUFFER = "--dataloader-inter-document-masking"
LENGTHS = (8, 24, 16)  # multiples of 2 cp: every layout can cut them


@cache
def parser_of_megatron() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser())


@contextmanager
def launched_with(*flags: str) -> Iterator[None]:
    """Megatron's arguments, as its scripts set them before they build a model."""
    from megatron.training import global_vars

    with patch.object(
        global_vars, "_GLOBAL_ARGS", parser_of_megatron().parse_args(flags)
    ):
        yield


def build_model(cp: int = 2, pattern: str = "MG*-", **options) -> HybridModel:
    """Over the ranks' context-parallel group, or on one rank of it."""
    changes = options.pop("config", {})
    heads = pattern.count("/") or None
    config = model_config(pattern, mtp_num_layers=heads, context_parallel_size=cp)
    vars(config).update(changes)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if cp == 1:
        groups.cp = group_of_one()
    spec = hybrid_stack_spec("local", **options)
    rope = {"position_embedding_type": "rope"}
    return hybrid_model(config, pattern, spec, pg_collection=groups, **rope)


def one_and_two(cp: int = 2, **options) -> tuple[HybridModel, HybridModel]:
    """A model on one rank, and one of the same weights over both."""
    one = build_model(cp=1)
    model = build_model(cp=cp, **options)
    model.load_state_dict(one.state_dict())
    return one, model


def held_by_two(cut: str = "zigzag", lengths=LENGTHS) -> torch.Tensor:
    rank = parallel_state.get_context_parallel_rank()
    return local_indices(lengths, 2, rank, SequenceLayout.parse(cut))


def require_one_ranks_gradients(
    model, one, held, packed, tolerance: float = 1e-4
) -> None:
    """Losses and every gradient of ``model`` over the ranks' tokens ``held`` are
    ``one``'s."""
    tokens = torch.arange(sum(LENGTHS) + 1).square().remainder(VOCABULARY)[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    weight = torch.linspace(0.5, 1.5, sum(LENGTHS))[None]

    def run(model, held, packed):
        model.zero_grad()
        inputs = tokens[:, :-1][:, held]
        labels = tokens[:, 1:][:, held]
        loss = model(
            inputs, positions[:, held], None, labels=labels, packed_seq_params=packed
        )
        (loss * weight[:, held]).sum().backward()
        return loss.detach()

    expected = run(
        one, torch.arange(sum(LENGTHS)), None if packed is None else thd(LENGTHS)
    )
    found = run(model, held, packed)
    assert_close("loss", found, expected[:, held], tolerance)
    for name, parameter in model.named_parameters():
        grad = parameter.grad.clone()
        if len(held) < sum(LENGTHS):
            dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        theirs = one.get_parameter(name).grad
        assert theirs.abs().max() > 0, name
        assert_close(name, grad, theirs, tolerance)


def told(flags: tuple[str, ...], cut: str, mode: str | None = None, **options) -> None:
    """A model under this launch, over documents that were cut so, equals one rank."""
    with parallel(cp=2), launched_with(*flags):
        one, model = one_and_two(**options)
        held = held_by_two(cut)
        packed = thd(LENGTHS)
        if mode is not None:
            packed.cp_partition_mode = mode
        require_one_ranks_gradients(model, one, held, packed)


def _refused(
    pattern: str, flags: tuple = (), mode: str | None = None, **options
) -> str:
    """What is said where sources contradict each other; "" if nothing is."""
    packed = thd(LENGTHS)
    if mode is not None:
        packed.cp_partition_mode = mode
    tokens = torch.zeros(1, sum(LENGTHS) // 2, dtype=torch.long)
    given = {
        "labels": tokens,
        "loss_mask": torch.ones_like(tokens),
        "packed_seq_params": packed,
    }
    with launched_with(*flags):
        try:
            build_model(pattern=pattern, **options)(tokens, tokens, None, **given)
        except ValueError as error:
            return str(error)
    return ""


# Flags of a launch, the cut that layers read from them, and what else is given.
TOLD = {
    "inter-document masking": ((BUFFER,), "zigzag_buffer", {}),
    "masking and sft": ((BUFFER, "--sft"), "zigzag", {}),
    "sft": (("--sft",), "zigzag", {}),
    "hybrid cp": (("--hybrid-context-parallel",), "zigzag_buffer", {}),
    "no flag": ((), "zigzag", {}),
    "an option that agrees": (
        (BUFFER,),
        "zigzag_buffer",
        {"cp_layout": "zigzag_buffer"},
    ),
    **{
        f"packed_seq_params, {mode}": (
            (),
            "contiguous",
            {**BY_PARAMS, "linear_cp_mode": mode},
        )
        for mode in ("headwise", "chunkwise")
    },
    "config": ((), "contiguous", {"config": CONTIGUOUS}),
    "config and packed_seq_params": (
        (),
        "contiguous",
        {"config": CONTIGUOUS, **BY_PARAMS},
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_layers_follow_the_cut_that_the_loader_and_the_launch_name(pools, case):
    flags, cut, options = TOLD[case]
    pools(2).run(told, flags, cut, **options)


@on_ranks(cp=2)
def test_micro_batches_of_one_model_may_be_cut_differently():
    one, model = one_and_two()
    for mode, cut in (
        (None, "zigzag"),
        ("contiguous", "contiguous"),
        ("zigzag", "zigzag"),
        ("zigzag_buffer", "zigzag_buffer"),
        ("contiguous", "contiguous"),
    ):
        packed = thd(LENGTHS)
        packed.cp_partition_mode = mode
        require_one_ranks_gradients(model, one, held_by_two(cut), packed)


@pytest.mark.parametrize("kind", ["G", "M", "*"])
@on_ranks(cp=2)
def test_sources_that_contradict_each_other_are_refused_by_name(kind):
    option = "cp_layout='zigzag'"
    params = "packed_seq_params.cp_partition_mode="
    by_config = "config.cp_partition_mode='contiguous'"
    cases = {
        (option, BUFFER, "'zigzag_buffer'"): {
            "cp_layout": "zigzag",
            "flags": (BUFFER,),
        },
        (option, f"{params}'contiguous'"): {
            "cp_layout": "zigzag",
            "mode": "contiguous",
        },
        (by_config, f"{params}'zigzag'"): {"config": CONTIGUOUS, "mode": "zigzag"},
        (by_config, "--sft"): {"config": CONTIGUOUS, "flags": ("--sft",)},
        ("cp_partition_mode='striped'", "'contiguous'"): {"mode": "striped"},
    }
    for names, case in cases.items():
        said = _refused(kind, **case)
        assert all(name in said for name in names), (names, said)


@pytest.mark.parametrize(
    "case",
    [{"flags": (BUFFER,)}, {"config": CONTIGUOUS}, {"mode": "contiguous"}],
    ids=str,
)
@on_ranks(cp=2)
def test_heads_of_multi_token_prediction_refuse_another_cut_than_zigzag(case):
    assert "shifts the labels" in _refused("G/G", **case)


@on_ranks(cp=2)
def test_a_contradiction_is_refused_when_a_layer_gets_its_ranks():
    """Not at its first forward; over one rank every layout is the same."""
    config = make_config()
    config.cp_partition_mode = "contiguous"
    layer = build_layer(config, alone(), {"cp_layout": "zigzag"})
    with pytest.raises(ValueError, match="contradict each other"):
        layer.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    assert layer.cp_size == 1


def test_a_packing_scheduler_of_newer_megatrons_decides_in_place_of_flags():
    layout = LoaderLayout("auto", make_config())
    with launched_with(BUFFER):
        assert layout.of_packed() is SequenceLayout.ZIGZAG_BUFFER
        launch_arguments()["sequence_packing_scheduler"] = "dp_balanced"
        assert layout.of_packed() is SequenceLayout.ZIGZAG


def test_the_log_says_which_cut_is_taken_and_who_names_it(caplog):
    caplog.set_level("INFO", logger="megatron_gdn")
    for cached in (log_once, _layout_of_sources):
        cached.cache_clear()
    layout = LoaderLayout("auto", make_config())
    for mode in (None, "contiguous"):
        layout.of_packed(mode)
    cuts = [text.partition(": ")[2] for text in caplog.messages]
    assert cuts == [
        "packed documents are taken as cut 'zigzag' over context-parallel ranks (no "
        "setting names a layout)",
        "packed documents are taken as cut 'contiguous' over context-parallel ranks "
        "(packed_seq_params.cp_partition_mode='contiguous')",
    ]
