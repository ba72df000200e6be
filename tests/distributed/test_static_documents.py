"""Documents in fixed buffers, for CUDA graphs: bits of ordinary ones, and nothing read
on the host.

The plain rule on the CPU; ``tests/gpu/test_graphs.py`` has the GPU rules and the graphs
themselves.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state

from megatron_gdn import (
    Documents,
    SequenceLayout,
    set_documents,
    static_packed_seq_params,
)
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.context_parallel.agreement import CHECK_RANKS_VARIABLE
from megatron_gdn.mixers.packing import static_documents_of
from tests.distributed.layer_laws import (
    forward_backward,
    over_ranks,
    randomise_,
    require_same_bits,
    thd,
)
from tests.distributed.mixers import FULL_GATES, KDA_FP32
from tests.graphs_on_cpu import captured_arguments, capturing_by_megatron, mismatches
from tests.host_reads import HostRead, no_host_reads
from tests.parallel import groups_of_megatron
from tests.ranks import on_ranks
from tests.whole_groups import whole_groups

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
TOKENS = 256
MOST = 8
SETS = ((256,), (0, 8, 248, 0), (8, 16, 24, 32, 40, 136), (80, 0, 0, 0, 0, 80, 0, 96))
# Where the whole buffer is cut: any lengths, fragments of many documents, documents
# over many.
ODD_SETS = ((0, 127, 0, 129), (3, 61, 64, 5, 7, 50, 2, 64), (1,) * 7 + (249,))


def nightly(*values, id=None):
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)


@contextmanager
def documents_of_the_device() -> Iterator[None]:
    """Ranks do not compare, which reads; products have one shape for any documents."""
    with patch.dict(os.environ, {CHECK_RANKS_VARIABLE: "0"}), whole_groups(32):
        yield


def offsets_of(lengths: tuple[int, ...]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def addresses(documents) -> dict:
    """Of every tensor that is derived from the boundaries."""
    tables = {
        key: [x.data_ptr() for x in made]
        for key, (_, made) in documents._tables.items()
    }
    return {
        "plans": {key: id(plan) for key, plan in documents.kept_results.items()},
        **tables,
    }


def assert_same(found, expected, lengths, mode: str | None) -> None:
    """The bits of ordinary documents; chunkwise to rounding: there products have other
    shapes."""
    if mode != "chunkwise":
        return require_same_bits(found, expected, lengths)
    for name, value in expected.items():
        largest = value.abs().max().item()
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("cp", "mode", "layout", "changes"),
    [
        (1, None, "zigzag", {}),
        nightly(1, None, "zigzag", BF16, id="1-None-zigzag-bf16"),
        nightly(2, "headwise", "zigzag", {}),
        pytest.param(2, "headwise", "zigzag_buffer", {}, marks=pytest.mark.slow),
        nightly(2, "headwise", "contiguous", {}),
        nightly(4, "headwise", "zigzag", {}),
        nightly(2, "chunkwise", "zigzag", {}),
        nightly(4, "chunkwise", "zigzag", {}),
        nightly(2, "chunkwise", "zigzag_buffer", {}),
        pytest.param(4, "chunkwise", "zigzag_buffer", {}, marks=pytest.mark.slow),
        nightly(4, "chunkwise", "contiguous", {}),
        (2, "chunkwise", "contiguous", {}),
    ],
)
@on_ranks(cp="cp")
def test_many_sets_of_documents_in_one_set_of_buffers(cp, mode, layout, changes):
    """At the same addresses; and the host reads nothing."""
    layer = over_ranks(changes, linear_cp_mode=mode, cp_layout=layout)
    randomise_(layer)
    holds_many_sets(layer, cp, mode, layout)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "ranks",
    [{}, pytest.param(FULL_GATES, marks=pytest.mark.slow)],
    ids=["low rank", "full gates"],
)
@pytest.mark.parametrize(
    ("cp", "mode", "layout"),
    [
        (1, None, "zigzag"),
        pytest.param(2, "headwise", "zigzag_buffer", marks=pytest.mark.slow),
        pytest.param(2, "chunkwise", "contiguous", marks=pytest.mark.slow),
    ],
)
@on_ranks(cp="cp")
def test_so_does_kimi_delta_attention(cp, mode, layout, ranks):
    kind = KDA_FP32
    config = kind.config(context_parallel_size=cp)
    options = {"linear_cp_mode": mode, "cp_layout": layout, **ranks}
    torch.manual_seed(7)
    layer = kind.build(config, groups_of_megatron(), **options)
    kind.randomise(layer)
    holds_many_sets(layer, cp, mode, layout)


def holds_many_sets(layer, cp: int, mode: str | None, layout: str) -> None:
    """Many sets of documents, one after the other, in one set of buffers."""
    shape = (2, TOKENS, 1, layer.config.hidden_size)
    dtype = layer.config.params_dtype
    x, weight = torch.randn(shape, dtype=dtype)
    packed = static_packed_seq_params(TOKENS, MOST, device="cpu")
    documents = static_documents_of(packed)
    first = None
    rank = parallel_state.get_context_parallel_rank()
    with documents_of_the_device():
        for lengths in SETS if layout == "zigzag" else ODD_SETS:
            mine = local_indices(lengths, cp, rank, SequenceLayout(layout))
            step = partial(forward_backward, layer, x[mine], weight=weight[mine])
            expected = step(thd(lengths))
            set_documents(packed, offsets_of(lengths))
            if first is None:
                step(packed)  # makes the tables
                first = addresses(documents)
            with no_host_reads():
                documents.refresh()
                found = step(packed)
            assert addresses(documents) == first
            assert_same(found, expected, lengths, mode)


def test_a_host_read_is_seen():
    """What the laws below rely on: ordinary documents are read from their tensor."""
    offsets = torch.tensor([0, 3, 8])
    with pytest.raises(HostRead, match="tolist"), no_host_reads():
        Documents.from_cu_seqlens(offsets, 8)
    with pytest.raises(HostRead, match="local_scalar"), no_host_reads():
        torch.ops.aten._local_scalar_dense(offsets[0])
    with pytest.raises(HostRead, match="repeat_interleave"), no_host_reads():
        offsets.repeat_interleave(offsets)


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "mode"), [(1, None), (2, "headwise"), (2, "chunkwise")])
@on_ranks(cp="cp")
def test_a_layer_in_megatrons_graphs_reads_the_buffers(cp, mode):
    """What a capture runs has the bits of an ordinary step, for the documents that were
    set last.

    The boundaries that Megatron's capture sees are zeros. The host reads nothing.
    """
    eager = over_ranks(linear_cp_mode=mode)
    layer = over_ranks({"cuda_graph_impl": "local"}, linear_cp_mode=mode)
    randomise_(eager)
    layer.load_state_dict(eager.state_dict())
    x, weight = torch.randn(2, TOKENS, 1, layer.hidden_size)
    packed = static_packed_seq_params(TOKENS, MOST, device="cpu")
    step = {"packed_seq_params": packed}
    with documents_of_the_device():
        # the step that Megatron records
        forward_backward(layer, torch.randn(TOKENS // cp, 1, layer.hidden_size), packed)
        captured = captured_arguments(step)["packed_seq_params"]
        assert captured.cu_seqlens_q.tolist() == [0] * (MOST + 1)
        for lengths in SETS:
            mine = local_indices(
                lengths, cp, parallel_state.get_context_parallel_rank()
            )
            set_documents(packed, offsets_of(lengths))
            assert mismatches(step, {"packed_seq_params": captured}) == []
            with no_host_reads(), capturing_by_megatron():
                found = forward_backward(layer, x[mine], captured, weight=weight[mine])
            expected = forward_backward(
                eager, x[mine], thd(lengths), weight=weight[mine]
            )
            assert_same(found, expected, lengths, mode)


@pytest.mark.parametrize(
    ("mode", "layout", "start"),
    [
        ("headwise", "zigzag", 64),
        ("chunkwise", "zigzag", 64),
        ("chunkwise", "zigzag_buffer", 60),
        ("chunkwise", "contiguous", 124),
    ],
)
@on_ranks(cp=2)
def test_a_number_that_is_not_finite_stays_in_its_document(mode, layout, start):
    """NaN in the second document, on every rank shorter than the convolution reaches or
    not."""
    layer = over_ranks(linear_cp_mode=mode, cp_layout=layout)
    randomise_(layer)
    lengths = (start, 8, 4, TOKENS - start - 12)
    rank = parallel_state.get_context_parallel_rank()
    mine = local_indices(lengths, 2, rank, SequenceLayout(layout))
    others = (mine < start) | (mine >= start + 8)
    x, weight = torch.randn(2, TOKENS, 1, layer.hidden_size)
    broken = x.clone()
    broken[start : start + 8] = torch.nan
    packed = static_packed_seq_params(TOKENS, MOST, device="cpu")
    set_documents(packed, offsets_of(lengths))
    with patch.dict(os.environ, {CHECK_RANKS_VARIABLE: "0"}):
        expected, found = (
            forward_backward(layer, y[mine], packed, weight=weight[mine])
            for y in (x, broken)
        )
    for name in ("output", "input"):
        assert torch.equal(found[name][others], expected[name][others]), name
        assert found[name][~others].isnan().any()


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@on_ranks(cp=2)
def test_documents_that_zigzag_cannot_cut_are_refused_before_anything_is_written(mode):
    packed = static_packed_seq_params(32, 2, device="cpu")
    x = torch.randn(16, 1, 24)
    set_documents(packed, [0, 12, 32])
    layer = over_ranks(linear_cp_mode=mode)
    expected = forward_backward(layer, x, packed)
    with pytest.raises(
        ValueError, match="sequence 0 has 18 tokens, .* not a multiple of 4"
    ):
        set_documents(packed, [0, 18, 32])
    assert packed.cu_seqlens_q.tolist() == [0, 12, 32]
    require_same_bits(forward_backward(layer, x, packed), expected)


@on_ranks(cp=2)
def test_a_forward_refuses_documents_that_zigzag_cannot_cut():
    packed = static_packed_seq_params(32, 2, device="cpu")
    set_documents(packed, [0, 18, 32])  # no layer has run with these buffers yet
    layer = over_ranks(linear_cp_mode="chunkwise")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must be a multiple of 4 tokens"):
            layer(torch.randn(16, 1, 24), None, packed_seq_params=packed)
