"""Gated DeltaProduct's documents in fixed buffers, whose rule has n rows per token."""

import pytest
import torch

from tests.distributed.mixers import GDP_FP32
from tests.distributed.test_static_documents import holds_many_sets
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
    holds_many_sets(layer, cp, mode, layout)
