"""Context-parallel ranks are given the same micro-batch, or told that they were not."""

import gc
import weakref
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn import set_documents, static_packed_seq_params
from megatron_gdn.context_parallel import agreement
from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.mixers.loader_layout import LoaderLayout
from megatron_gdn.mixers.micro_batch import MicroBatchPlanner
from megatron_gdn.mixers.options import MixerOptions
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.stages import front_maker
from tests.distributed.layer_laws import over_ranks, thd
from tests.parallel import make_config
from tests.ranks import on_ranks


def _layers(count: int) -> list:
    agreement._agreements.clear()  # groups are kept from test to test
    return [over_ranks() for _ in range(count)]


def _run(
    layers, tokens=16, rows=1, packed: PackedSeqParams | None = None
) -> torch.Tensor:
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


@on_ranks(cp=2)
def test_ranks_that_disagree_are_told_what_each_was_given():
    rank = dist.get_rank()
    layers = _layers(2)
    # what they agree on is no reason to trust the next
    _run(layers, packed=thd((8, 8)))
    message = _refusal(layers, packed=thd((8, 8) if rank else (4, 12)))
    assert "rank 0: 16 tokens over all ranks in 1 row, 2 documents" in message, message
    own = [0, 8, 16] if rank else [0, 4, 16]
    assert f"This rank was given cu_seqlens={own}" in message, message
    assert "global boundaries" in message and "before any split" in message, message
    packed = thd((8, 8))
    packed.cp_partition_mode = "contiguous" if rank else "zigzag"
    message = _refusal(layers, packed=packed)
    assert "cut 'zigzag'; rank 1" in message and "cut 'contiguous'" in message, message


@on_ranks(cp=2)
def test_ranks_that_disagree_about_sizes_or_packing_are_told_so():
    rank = dist.get_rank()
    layers = _layers(1)
    message = _refusal(layers, tokens=32 if rank else 16)
    assert "rank 1: 32 tokens over all ranks in 1 row, not packed" in message, message
    message = _refusal(layers, rows=3 if rank else 2)
    assert "rank 0: 16 tokens over all ranks in 2 rows" in message, message
    message = _refusal(layers, tokens=24, packed=thd((8, 16)) if rank else None)
    assert "rank 0: 24 tokens over all ranks in 1 row, not packed" in message, message
    assert "rank 1: 24 tokens over all ranks in 1 row, 2 documents" in message, message


@on_ranks(cp=2)
def test_nobody_waits_alone_for_an_object_that_another_rank_has_resolved():
    """One rank keeps its PackedSeqParams, the other makes an equal one for every
    micro-batch."""
    kept = thd((8, 8))
    layers = _layers(2)
    for _ in range(3):
        _run(layers, packed=kept if dist.get_rank() else thd((8, 8))).sum()
    _run(layers, packed=thd((4, 12)))


@on_ranks(cp=2)
def test_one_layer_compares_and_knows_contents_that_it_has_seen():
    gathered = []
    gather_before = agreement._gather

    def gather(mine, *rest):
        if len(mine) == 5:  # not the hosts
            gathered.append(mine[2:])
        return gather_before(mine, *rest)

    def known() -> int:
        return sum(
            len(of_group.agreed_micro_batches)
            for of_group in agreement._agreements.values()
        )

    with patch.object(agreement, "_gather", gather):
        layers = _layers(3)
        counts = []
        for lengths in ((8, 8), (8, 8), (4, 12), (8, 8)):
            _run(layers, packed=thd(lengths))
            counts.append(known())
        assert len(gathered) == 4, gathered
        assert counts == [1, 1, 2, 2]
        _run(layers)
        _run(layers)
        assert (len(gathered), known()) == (6, 3)
        with patch.object(agreement, "_MOST_REMEMBERED_MICRO_BATCHES", 3):
            _run(layers, packed=thd((12, 4)))
        assert (len(gathered), known()) == (7, 1), "what is remembered is bounded"


@on_ranks(2)
def test_schemes_of_groups_that_went_are_not_kept():
    """Sixteen groups are kept at a time, the layer's own (none) among them; each has
    one scheme."""
    sizes = HeadSizes(2, 4, 4, 4)
    config = make_config()
    chooser = MicroBatchPlanner(
        config,
        sizes.layout,
        sizes.state_shape,
        4,
        None,
        LoaderLayout("zigzag", config),
        MixerOptions(linear_cp_mode="auto"),
        partial(resolve_rule, "reference", sizes=sizes, operands="bf16"),
        front_maker(gdn_table),
    )
    made = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(20)]
    seen = []
    rows = torch.zeros(8, 1, sizes.layout.width)
    gc.disable()  # what a cycle keeps alive counts as alive
    try:
        for number in range(80):
            packed = thd((4, 12))
            packed.cp_group = made[number % 20]
            batch = chooser.of(packed, rows)
            batch.local_positions()
            batch.passage.to_stages(rows)
            scheme = batch.scheme
            if not any(known() is scheme for known in seen):
                seen.append(weakref.ref(scheme))
            if number == 78:  # the last but one
                packed_before = packed
                batch_before = batch
        assert chooser.of(packed_before, rows) is batch_before, "made again"
        del scheme, packed, batch, packed_before, batch_before
        assert sum(known() is not None for known in seen) == 15
    finally:
        gc.enable()
        for group in made:
            dist.destroy_process_group(group)


@on_ranks(cp=2)
def test_ranks_whose_fixed_buffers_differ_are_told_how_many_documents_each_holds():
    rank = dist.get_rank()
    layers = _layers(1)
    packed = static_packed_seq_params(16, 3 + rank, device="cpu")
    set_documents(packed, [0, 8, 16])
    message = _refusal(layers, packed=packed)
    for other in range(2):
        said = f"rank {other}: 16 tokens over all ranks in 1 row, fixed buffers for up"
        assert f"{said} to {3 + other} documents" in message, message
