"""Gated DeltaProduct's documents in fixed buffers, whose rule has n rows per token."""

from functools import partial

import pytest
import torch
from megatron.core import parallel_state

from megatron_gdn import SequenceLayout, set_documents, static_packed_seq_params
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.packing import static_documents_of
from tests.distributed.layer_laws import forward_backward, thd
from tests.distributed.mixers import GDP_FP32
from tests.distributed.test_static_documents import (
    MOST,
    ODD_SETS,
    TOKENS,
    addresses,
    assert_same,
    documents_of_the_device,
    offsets_of,
)
from tests.host_reads import no_host_reads
from tests.parallel import groups_of_megatron
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    ("cp", "mode"),
    [
        (1, None),
        pytest.param(2, "headwise", marks=pytest.mark.slow),
        pytest.param(2, "chunkwise", marks=pytest.mark.slow),
    ],
)
@on_ranks(cp="cp")
def test_many_sets_of_documents_in_one_set_of_buffers(cp, mode):
    """With the bits of ordinary documents, at the same addresses; the host reads
    nothing."""
    layout = "zigzag_buffer"
    config = GDP_FP32.config(context_parallel_size=cp)
    torch.manual_seed(7)
    layer = GDP_FP32.build(
        config, groups_of_megatron(), linear_cp_mode=mode, cp_layout=layout
    )
    GDP_FP32.randomise(layer)
    x, weight = torch.randn(2, TOKENS, 1, config.hidden_size)
    packed = static_packed_seq_params(TOKENS, MOST, device="cpu")
    documents = static_documents_of(packed)
    first = None
    rank = parallel_state.get_context_parallel_rank()
    with documents_of_the_device():
        for lengths in ODD_SETS:
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
