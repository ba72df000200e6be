"""Rows of projections as frameworks order them."""

from argparse import Namespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as Theirs

from megatron_gdn.frameworks.mcore_bridge import row_order_by_key_head
from megatron_gdn.frameworks.miles import enable
from megatron_gdn.frameworks.slime import _from_rank_order, _to_rank_order
from megatron_gdn.gdn.hf import gdn_layer_maps
from megatron_gdn.ops.delta_rule.base import HeadSizes
from tests.frameworks.test_patch import is_ours
from tests.gdn_mixer import gdn_dims

pytestmark = pytest.mark.usefixtures("undone")

DIMS = gdn_dims(6, 4, 8, 2, 3)
MAPS = gdn_layer_maps("", "linear_attn.", DIMS, "flat")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("entry", MAPS, ids=lambda entry: entry.name)
def test_equal_parts_are_the_ranks_shares_and_join_to_the_whole(entry, tp, monkeypatch):
    monkeypatch.setattr(
        parallel_state, "get_tensor_model_parallel_world_size", lambda: tp
    )
    pieces = [torch.randn(source.shape) for source in entry.sources]
    whole = entry.to_megatron(pieces)
    ordered = _to_rank_order(entry, whole)
    if entry.shard_dim is not None:
        for part, share in zip(
            ordered.chunk(tp, entry.shard_dim), entry.shards(whole, tp), strict=True
        ):
            assert torch.equal(part, share)
    assert torch.equal(_from_rank_order(entry, ordered), whole)


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_ranks_share_of_their_rows_reordered_is_its_share_of_ours(tp, conv):
    whole = HeadSizes(4, 8, 3, 5).layout
    widths = whole.conv_widths if conv else whole.widths
    theirs = row_order_by_key_head(whole, conv=conv).chunk(tp)
    ours = [each.chunk(tp) for each in torch.arange(sum(widths)).split(widths)]
    back = row_order_by_key_head(whole.share(tp), conv=conv).argsort()
    for rank in range(tp):
        assert torch.equal(theirs[rank][back], torch.cat([each[rank] for each in ours]))


def test_the_rows_of_a_key_head_lie_together():
    assert row_order_by_key_head(HeadSizes(2, 4, 1, 1).layout).tolist() == [
        0,
        2,
        4,
        5,
        8,
        9,
        12,
        13,
        16,
        17,
        1,
        3,
        6,
        7,
        10,
        11,
        14,
        15,
        18,
        19,
    ]


QWEN = ["miles_plugins.models.qwen3_5", "get_qwen3_5_spec"]


@pytest.mark.parametrize(
    "args",
    [
        Namespace(spec=None, megatron_to_hf_mode="bridge"),
        Namespace(spec=QWEN, megatron_to_hf_mode="bridge"),
        Namespace(
            spec=["megatron_gdn.specs", "hybrid_stack_spec"], megatron_to_hf_mode="raw"
        ),
        Namespace(spec=["megatron_gdn.frameworks.slime", "get_qwen3_5_spec"]),
        Namespace(),
    ],
)
def test_what_bridge_or_megatron_builds_is_ours(args):
    enable(args)
    assert is_ours(Theirs)


@pytest.mark.parametrize("plugins", ["miles", "slime"])
def test_a_spec_with_layers_of_its_own_is_refused(plugins):
    spec = [QWEN[0].replace("miles", plugins), QWEN[1]]
    said = (
        f"--spec {spec[0]} builds .* slime: give --spec megatron_gdn.frameworks.slime"
    )
    with pytest.raises(ValueError, match=said):
        enable(Namespace(spec=spec, megatron_to_hf_mode="raw"))
    assert not is_ours(Theirs)
