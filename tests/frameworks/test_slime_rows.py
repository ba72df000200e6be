"""slime cuts a tensor into equal parts, one per tensor-parallel rank: each is a rank's share."""

import pytest
import torch
from megatron.core import parallel_state

from megatron_gdn import GDNDims
from megatron_gdn.frameworks.slime import _of_ranks, _rank_after_rank
from megatron_gdn.gdn.hf import gdn_layer_maps

DIMS = GDNDims(
    hidden_size=6, num_key_heads=4, num_value_heads=8, key_head_dim=2, value_head_dim=3,
    conv_kernel_dim=4,
)  # fmt: skip
MAPS = gdn_layer_maps("", "linear_attn.", DIMS, "flat")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("entry", MAPS, ids=lambda entry: entry.name)
def test_equal_parts_are_the_ranks_shares_and_join_to_the_whole(entry, tp, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: tp)
    pieces = [torch.randn(source.shape) for source in entry.sources]
    whole = entry.to_megatron(pieces)
    ordered = _rank_after_rank(entry, whole)
    if entry.shard_dim is not None:
        for part, share in zip(
            ordered.chunk(tp, entry.shard_dim), entry.shards(whole, tp), strict=True
        ):
            assert torch.equal(part, share)
    assert torch.equal(_of_ranks(entry, ordered), whole)
