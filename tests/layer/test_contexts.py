"""What a call or a context changes in objects of others is there again afterwards, also
if it fails."""

import os
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_gdn.compat import kda_files, mixed_dtype_optimizers, untrusted_checkpoints
from megatron_gdn.compat.checkpoints import store_empty_shares
from megatron_gdn.mixers.out_norm import gradients_summed
from tests.precision.half_optimizer import half_optimizer

pytestmark = pytest.mark.usefixtures("one_rank")


def objects(values):
    """By identity, since tensors that are equal need not be the same."""
    return {name: id(value) for name, value in values.items()}


def summed(body, see, monkeypatch):
    norm = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3, bias=False))
    see(lambda: [objects(part._parameters) for part in norm])
    with gradients_summed(norm, dist.group.WORLD):
        body()


def masters(body, see, monkeypatch):
    optimizer = half_optimizer()
    see(lambda: objects(vars(optimizer)))
    with mixed_dtype_optimizers._fp32_parameters_as_their_own_masters(optimizer):
        body()


def main_grads(body, see, monkeypatch):
    optimizer = half_optimizer()
    ((parameter,),) = optimizer.fp32_from_fp32_groups
    see(lambda: objects(vars(parameter)))
    mixed_dtype_optimizers._use_grads_as_main_grads(lambda _: body(), optimizer)


class WithoutShares:
    gbuf_ranges = ({"bf16": [{"param_map": {}}]},)
    buffers = ()
    data_parallel_group = None

    def get_parameter_state_dp_reshardable(self):
        return {}


def empty_shares(body, see, monkeypatch):
    optimizer = WithoutShares()
    see(lambda: objects(vars(optimizer)))

    def original(_):
        assert vars(optimizer), "empty bucket encountered"
        body()

    store_empty_shares(original, optimizer)


def old_names(body, see, monkeypatch):
    new, old = next(iter(kda_files._OLD_KEY_ENDS.items()))
    tensor = ShardedTensor.from_rank_offsets(f"layer.{new}", torch.zeros(2))
    see(lambda: tensor.key)
    stored = SimpleNamespace(state_dict_metadata={f"layer.{old}": None})
    monkeypatch.setattr(FileSystemReader, "read_metadata", lambda _: stored)
    kda_files.load_old_names(
        lambda *_: body() or {}, None, {"weight": tensor}, "folder"
    )


def pickles(body, see, monkeypatch):
    force = untrusted_checkpoints._FORCE_WEIGHTS_ONLY
    force_not = untrusted_checkpoints._FORCE_NO_WEIGHTS_ONLY
    monkeypatch.delenv(force, raising=False)
    monkeypatch.setenv(force_not, "1")
    see(lambda: [FileSystemReader.read_metadata, *map(os.getenv, (force, force_not))])
    with untrusted_checkpoints.untrusted_checkpoint():
        body()


def gates_of_transformers(body, see, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from megatron_gdn.hf import gates_in_fp32

    see(lambda: transformers.PreTrainedModel.post_init)
    with gates_in_fp32():
        body()


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize(
    "call",
    [
        summed,
        masters,
        main_grads,
        empty_shares,
        old_names,
        pickles,
        gates_of_transformers,
    ],
)
def test_what_was_changed_is_as_before(call, fails, monkeypatch):
    looks = []

    def see(look):
        looks.extend((look, look()))

    def body():
        look, before = looks
        assert look() != before, "nothing was changed"
        if fails:
            raise OSError("no space left on device")

    with suppress(OSError):
        call(body, see, monkeypatch)
        assert not fails
    look, before = looks
    assert look() == before
