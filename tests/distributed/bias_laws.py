"""Run on every rank: the projection's bias between our checkpoints and megatron-core's."""

import torch
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from torch.distributed.checkpoint.api import CheckpointException

from tests import upstream
from tests.distributed.model_laws import metadata
from tests.parallel import make_config, parallel, share_of


def build(theirs: bool):
    before, upstream.TESTING_UPSTREAM = upstream.TESTING_UPSTREAM, theirs
    try:
        spec = upstream.layer_spec(bias=True)
    finally:
        upstream.TESTING_UPSTREAM = before
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    return build_module(spec, config=make_config(), layer_number=1, pg_collection=groups)


def bias_of(tp: int) -> torch.Tensor:
    """This rank's share of the bias 0, 1, 2, ..."""
    ours = build(theirs=False)
    return share_of("in_proj.bias", torch.arange(ours.global_dims.layout.width).float(), ours)


def save(folder: str, tp: int, theirs: bool, **changes) -> str | None:
    """The error, if any."""
    with parallel(tp=tp):
        layer = build(theirs)
        with torch.no_grad():
            layer.in_proj.bias.copy_(bias_of(tp))
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
        return "equal" if torch.equal(layer.in_proj.bias, bias_of(tp)) else "scrambled"
