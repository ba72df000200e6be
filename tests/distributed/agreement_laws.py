"""Run on every rank: what happens if context-parallel ranks are given different micro-batches."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn.context_parallel import agreement
from megatron_gdn.gdn.rule import choose_rule
from megatron_gdn.mixers.loader_layout import LoaderLayout
from megatron_gdn.mixers.micro_batch import MicroBatches
from megatron_gdn.ops.delta_rule.base import HeadSizes
from tests.distributed.layer_laws import build_layer, thd
from tests.parallel import make_config, parallel


@contextmanager
def _layers(count: int) -> Iterator[list]:
    with parallel(cp=dist.get_world_size()):
        groups = ProcessGroupCollection(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
        )
        config = make_config(context_parallel_size=dist.get_world_size())
        agreement._groups.clear()  # groups are kept from test to test
        yield [build_layer(config, groups, {}) for _ in range(count)]


def _run(layers, tokens=16, rows=1, packed: PackedSeqParams | None = None) -> torch.Tensor:
    x = torch.zeros(tokens // dist.get_world_size(), rows, layers[0].hidden_size)
    for layer in layers:
        x, _ = layer(x, None, packed_seq_params=packed)
    return x


def _refusal(*args, **options) -> str:
    try:
        _run(*args, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("accepted")


def ranks_that_disagree_are_told_what_each_was_given() -> None:
    rank = dist.get_rank()
    with _layers(2) as layers:
        _run(layers, packed=thd((8, 8)))  # what they agree on is no reason to trust the next
        message = _refusal(layers, packed=thd((8, 8) if rank else (4, 12)))
        assert "rank 0: 16 tokens over all ranks in 1 row, 2 documents" in message, message
        own = [0, 8, 16] if rank else [0, 4, 16]
        assert f"This rank was given cu_seqlens={own}" in message, message
        assert "global boundaries" in message and "before any split" in message, message
        packed = thd((8, 8))
        packed.cp_partition_mode = "contiguous" if rank else "zigzag"
        message = _refusal(layers, packed=packed)
        assert "cut 'zigzag'; rank 1" in message and "cut 'contiguous'" in message, message


def ranks_that_disagree_about_sizes_or_packing_are_told_so() -> None:
    rank = dist.get_rank()
    with _layers(1) as layers:
        message = _refusal(layers, tokens=32 if rank else 16)
        assert "rank 1: 32 tokens over all ranks in 1 row, not packed" in message, message
        message = _refusal(layers, rows=3 if rank else 2)
        assert "rank 0: 16 tokens over all ranks in 2 rows" in message, message
        message = _refusal(layers, tokens=24, packed=thd((8, 16)) if rank else None)
        assert "rank 0: 24 tokens over all ranks in 1 row, not packed" in message, message
        assert "rank 1: 24 tokens over all ranks in 1 row, 2 documents" in message, message


def nobody_waits_alone_for_an_object_that_another_rank_has_resolved() -> None:
    """One rank keeps its PackedSeqParams, the other makes an equal one for every micro-batch."""
    kept = thd((8, 8))
    with _layers(2) as layers:
        for _ in range(3):
            _run(layers, packed=kept if dist.get_rank() else thd((8, 8))).sum()
        _run(layers, packed=thd((4, 12)))


def one_layer_compares_and_knows_contents_that_it_has_seen() -> None:
    gathered, news = [], []
    before, is_known_new = agreement._gather, agreement._Known.is_new

    def gather(mine, *rest):
        gathered.append(mine[2:])
        return before(mine, *rest)

    def is_new(known, contents):
        news.append(is_known_new(known, contents))
        return news[-1]

    agreement._gather, agreement._Known.is_new = gather, is_new
    try:
        with _layers(3) as layers:
            for lengths in ((8, 8), (8, 8), (4, 12), (8, 8)):
                _run(layers, packed=thd(lengths))
            assert len(gathered) == 4, gathered
            assert news == [True, False, True, False], news
            _run(layers)
            _run(layers)
            assert news[4:] == [True, False], news
    finally:
        agreement._gather, agreement._Known.is_new = before, is_known_new


def schemes_alive_while_groups_come_and_go(groups: int, micro_batches: int) -> int:
    """How many schemes a layer keeps after each micro-batch came with one of many groups."""
    sizes, config = HeadSizes(2, 4, 4, 4), make_config()
    chooser = MicroBatches(
        config, sizes.layout, sizes.state, 4, None, LoaderLayout("zigzag", config), mode="auto",
        choose_rule=partial(choose_rule, "reference", sizes, operands="bf16", normalise_qk=True),
    )  # fmt: skip
    made = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(groups)]
    seen = []
    rows = torch.zeros(8, 1, sizes.width)
    gc.disable()  # what a cycle keeps alive counts as alive
    try:
        for number in range(micro_batches):
            packed = thd((4, 12))
            packed.cp_group = made[number % groups]
            batch = chooser.of(packed, rows)
            batch.local_positions()
            batch.passage.open(rows)
            scheme = batch.scheme
            if not any(known() is scheme for known in seen):
                seen.append(weakref.ref(scheme))
        del scheme, packed, batch
        return sum(known() is not None for known in seen)
    finally:
        gc.enable()
        for group in made:
            dist.destroy_process_group(group)
