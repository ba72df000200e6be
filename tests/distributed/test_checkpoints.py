"""Checkpoints, and weights that Megatron reshards (refit), are the same layer at every
size."""

import re

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding import build_local_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from tests import upstream
from tests.distributed import model_laws as laws
from tests.distributed.layer_laws import randomise_, require_same_bits
from tests.distributed.mixers import BY_NAME
from tests.distributed.model_laws import metadata
from tests.parallel import groups_of_megatron, make_config, parallel, share_of
from tests.ranks import on_ranks


def test_tp2_cp2_loads_at_tp1_tp2_tp4_and_pp2(pools, tmp_path):
    options = {"bias": True, "conv_bias": True}
    pools(4).run(laws.save, str(tmp_path), 2, 2, options)
    whole = pools(2).run(laws.load_and_gather, str(tmp_path), 1, 1, options)[0]
    assert not any(torch.isnan(value).any() for value in whole.values())
    assert whole["decoder.layers.0.self_attention.A_log"].dtype == torch.float32
    biases = ("in_proj.bias", "conv1d.bias")
    expected = {
        f"decoder.layers.{n}.self_attention.{name}" for n in (0, 2) for name in biases
    }
    assert expected <= set(whole)

    for tp in (2, 4):
        for rank in pools(tp).run(laws.load_and_gather, str(tmp_path), tp, 1, options):
            require_same_bits(rank, whole)
    stages = pools(2).run(laws.load_and_gather, str(tmp_path), 1, 2, options)
    require_same_bits({**stages[0], **stages[1]}, whole)


def build(theirs: bool):
    before = upstream.TESTING_UPSTREAM
    upstream.TESTING_UPSTREAM = theirs
    try:
        spec = upstream.layer_spec(bias=True)
    finally:
        upstream.TESTING_UPSTREAM = before
    return build_module(
        spec, make_config(), layer_number=1, pg_collection=groups_of_megatron()
    )


def own_bias() -> torch.Tensor:
    """This rank's share of the bias 0, 1, 2, ..."""
    ours = build(theirs=False)
    return share_of(
        "in_proj.bias", torch.arange(ours.global_dims.layout.width).float(), ours
    )


def save(folder: str, tp: int, theirs: bool) -> None:
    with parallel(tp=tp):
        layer = build(theirs)
        with torch.no_grad():
            layer.in_proj.bias.copy_(own_bias())
        dist_checkpointing.save(
            layer.sharded_state_dict("layer.", metadata=metadata()), folder
        )


def outcome_of_loading(folder: str, tp: int, theirs: bool) -> str:
    with parallel(tp=tp):
        layer = build(theirs)
        torch.nn.init.constant_(layer.in_proj.bias, float("nan"))
        state = layer.sharded_state_dict("layer.", metadata=metadata())
        try:
            state = dist_checkpointing.load(state, folder)
        except CheckpointException as error:
            return str(error)
        layer.load_state_dict({k.removeprefix("layer."): v for k, v in state.items()})
        return "equal" if torch.equal(layer.in_proj.bias, own_bias()) else "scrambled"


@pytest.mark.parametrize("written_at", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_upstream_loads_at_any_tensor_parallel_size(
    pools, tmp_path, written_at
):
    pools(written_at).run(save, str(tmp_path), written_at, theirs=True)
    for tp in (1, 2):
        found = pools(tp).run(outcome_of_loading, str(tmp_path), tp, theirs=False)
        assert found == ["equal"] * tp
    # Why we do not write it so: upstream itself reads it at its own size only, and says
    # nothing.
    other = 3 - written_at
    found = pools(other).run(outcome_of_loading, str(tmp_path), other, theirs=True)
    assert "scrambled" in found


def test_sections_are_refused_by_upstream_and_not_misread(pools, tmp_path):
    pools(1).run(save, str(tmp_path), 1, theirs=False)
    (found,) = pools(1).run(outcome_of_loading, str(tmp_path), 1, theirs=True)
    assert "layer.in_proj.bias" in found, found


@pytest.mark.parametrize("mixer", BY_NAME)
@on_ranks(cp=1)
def test_a_tensor_that_a_checkpoint_lacks_is_named_by_its_key(tmp_path, mixer):
    kind = BY_NAME[mixer]
    layer = kind.build(kind.config(), groups_of_megatron())

    def state():
        return layer.sharded_state_dict("layer.", metadata=metadata())

    tensors = [key for key in state() if not key.endswith("_extra_state")]
    assert len(tensors) > 5
    for key in tensors:
        rest = state()
        name = re.escape(rest.pop(key).key)
        folder = tmp_path / key
        folder.mkdir()
        dist_checkpointing.save(rest, str(folder))
        with pytest.raises(CheckpointException, match=name):
            dist_checkpointing.load(state(), str(folder))


SIZES = (1, 2, 4, 1)


class PointToPoint(CopyService):
    """Each transfer is a message of torch's; Megatron's own service over gloo asks for
    CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._sends: list[tuple[Tensor, int, int]] = []
        self._receives: list[tuple[Tensor, int, int]] = []

    def submit_send(self, src_tensor, dest_rank, task_id=None) -> None:
        self._sends.append((src_tensor.detach().clone(), dest_rank, task_id))

    def submit_recv(self, dest_tensor, src_rank, task_id=None) -> None:
        self._receives.append((dest_tensor, src_rank, task_id))

    def run(self) -> None:
        here = {task: tensor for tensor, rank, task in self._sends if rank == self.rank}
        work = [
            dist.isend(t, r, tag=task) for t, r, task in self._sends if r != self.rank
        ]
        for tensor, rank, task in self._receives:
            if rank == self.rank:
                tensor.copy_(here[task])
            else:
                dist.recv(tensor, rank, tag=task)
        for one in work:
            one.wait()


# Sizes and options for four tensor-parallel ranks.
KINDS = {
    "gdn": ({}, {"bias": True, "conv_bias": True}),
    "gdn2": ({"linear_num_key_heads": 4}, {"bias": True, "conv_bias": True}),
    "gdp": ({"mamba_num_groups": 4}, {"bias": True, "conv_bias": True}),
    "mamba2": ({"mamba_num_groups": 4}, {}),
    "kda": (
        {"linear_num_key_heads": 4, "linear_value_head_dim": 8},
        {"conv_bias": True},
    ),
}


@pytest.mark.parametrize("mixer", KINDS)
@on_ranks(4)
def test_one_rank_to_two_to_four_to_one_is_the_identity(mixer):
    sizes, options = KINDS[mixer]
    kind = BY_NAME[mixer]
    wrong = []
    whole = {}
    source = None
    for tp in SIZES:
        with parallel(tp=tp):
            groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "dp"])
            config = kind.config(tensor_model_parallel_size=tp, **sizes)
            layer = kind.build(config, groups, **options)
            if source is None:
                torch.manual_seed(3)
                randomise_(layer)
                whole = {
                    name: p.detach().clone() for name, p in layer.named_parameters()
                }
            else:
                for parameter in layer.parameters():
                    nn.init.constant_(parameter, float("nan"))
                plan = build_local_reshard_plan(source, layer)
                execute_reshard_plan(plan, source, layer, PointToPoint())
            wrong += [
                f"{name} at tp {tp}"
                for name, parameter in layer.named_parameters()
                if not torch.equal(parameter, kind.share(name, whole[name], layer))
            ]
            source = layer
    assert not wrong
