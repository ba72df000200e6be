"""bias=True: megatron-core stores the projection's bias whole, we store it by sections."""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.spec_utils import build_module
from torch.distributed.checkpoint.api import CheckpointException

from tests import upstream
from tests.distributed.model_laws import metadata
from tests.parallel import groups_of_megatron, make_config, parallel, share_of


def build(theirs: bool):
    before, upstream.TESTING_UPSTREAM = upstream.TESTING_UPSTREAM, theirs
    try:
        spec = upstream.layer_spec(bias=True)
    finally:
        upstream.TESTING_UPSTREAM = before
    return build_module(spec, make_config(), layer_number=1, pg_collection=groups_of_megatron())


def own_bias() -> torch.Tensor:
    """This rank's share of the bias 0, 1, 2, ..."""
    ours = build(theirs=False)
    return share_of("in_proj.bias", torch.arange(ours.global_dims.layout.width).float(), ours)


def save(folder: str, tp: int, theirs: bool, **changes) -> str | None:
    """The error, if any."""
    with parallel(tp=tp):
        layer = build(theirs)
        with torch.no_grad():
            layer.in_proj.bias.copy_(own_bias())
        try:
            state = layer.sharded_state_dict("layer.", metadata=metadata() | changes)
        except ValueError as error:
            return str(error)
        dist_checkpointing.save(state, folder)


def outcome_of_loading(folder: str, tp: int, theirs: bool, **changes) -> str:
    with parallel(tp=tp):
        layer = build(theirs)
        torch.nn.init.constant_(layer.in_proj.bias, float("nan"))
        state = layer.sharded_state_dict("layer.", metadata=metadata() | changes)
        try:
            state = dist_checkpointing.load(state, folder)
        except CheckpointException as error:
            return str(error)
        layer.load_state_dict({k.removeprefix("layer."): v for k, v in state.items()})
        return "equal" if torch.equal(layer.in_proj.bias, own_bias()) else "scrambled"


@pytest.mark.parametrize("written_at", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_upstream_loads_at_any_tensor_parallel_size(pools, tmp_path, written_at):
    pools(written_at).run(save, str(tmp_path), written_at, theirs=True)
    for tp in (1, 2):
        found = pools(tp).run(outcome_of_loading, str(tmp_path), tp, theirs=False)
        assert found == ["equal"] * tp
    # Why we do not write it so: upstream itself reads it at its own size only, and says nothing.
    other = 3 - written_at
    found = pools(other).run(outcome_of_loading, str(tmp_path), other, theirs=True)
    assert "scrambled" in found


def test_upstream_reads_what_is_written_for_it(pools, tmp_path):
    (refusal,) = set(pools(2).run(save, str(tmp_path), 2, theirs=False, gdn_whole_bias=True))
    assert "tensor_model_parallel_size=1" in refusal
    pools(1).run(save, str(tmp_path), 1, theirs=False, gdn_whole_bias=True)
    assert pools(1).run(outcome_of_loading, str(tmp_path), 1, theirs=True) == ["equal"]
    for tp in (1, 2):
        found = pools(tp).run(outcome_of_loading, str(tmp_path), tp, theirs=False)
        assert found == ["equal"] * tp


def test_sections_are_refused_by_upstream_and_not_misread(pools, tmp_path):
    pools(1).run(save, str(tmp_path), 1, theirs=False)
    (found,) = pools(1).run(outcome_of_loading, str(tmp_path), 1, theirs=True)
    assert "layer.in_proj.bias" in found, found
