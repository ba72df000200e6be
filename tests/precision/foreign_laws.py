"""Run on every rank: checkpoints between our layer and Megatron's own, which keeps bf16."""

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gdn.fp32_masters import load_fp32_masters
from tests.parallel import parallel
from tests.precision.training import (
    FLOAT16,
    build,
    load,
    load_model_only,
    made_up_step,
    metadata,
    over_tp,
    replicas_of,
    save,
    tensors_in,
)

A_LOG = "decoder.layers.0.self_attention.A_log"


def master_key(kind: str) -> str:
    return f"optimizer.state.{'fp32_param' if kind == FLOAT16 else 'param'}.{A_LOG}"


def write(kind: str, folder: str, upstream_layer: bool) -> dict[str, torch.Tensor]:
    """Three steps, saved at tp2; what the file holds of A_log."""
    with parallel(tp=2):
        training = build(kind, tp=2, upstream_layer=upstream_layer)
        for step in range(3):
            made_up_step(training, step)
        save(training, folder)
    held = tensors_in(folder)
    return {"model": held[A_LOG], "master": held[master_key(kind)]}


def read(
    kind: str,
    folder: str,
    tp: int,
    again: str,
    upstream_layer: bool = False,
    optimizer: bool = True,
) -> dict[str, torch.Tensor]:
    """A_log of the model and its master, whole, after a load; all replicas must agree."""
    with parallel(tp=tp):
        training = build(kind, tp=tp, upstream_layer=upstream_layer, seed=99)
        (load if optimizer else load_model_only)(training, folder)
        return whole(training, kind, again)


def read_masters(
    kind: str, folder: str, tp: int, again: str, wrapped: bool
) -> dict[str, torch.Tensor]:
    """The same without the optimizer, and then with `load_fp32_masters`."""
    with parallel(tp=tp):
        training = build(kind, tp=tp, seed=99)
        load_model_only(training, folder)
        before = training.A_log.detach().clone()
        model = [training.ddp] if wrapped else training.model
        names = load_fp32_masters(model, folder, metadata(kind))
        expected = [A_LOG, A_LOG.replace("A_log", "dt_bias")]
        assert names == sorted(expected + [name.replace(".0.", ".2.") for name in expected]), names
        assert not torch.equal(training.A_log, before)
        found = whole(training, kind, again)
        made_up_step(training, 5)  # the optimizer goes on from the new values, not from the old
        moved = over_tp(training.A_log) - found["model"]
        assert 0 < moved.abs().max() < 0.02, moved
        return found


def read_dp_reshardable_of_upstream(folder: str) -> str:
    """The error of the load, and its notes."""
    with parallel():
        theirs = build("dp_reshardable", upstream_layer=True)
        made_up_step(theirs, 0)
        save(theirs, folder)
        try:
            load(build("dp_reshardable", seed=99), folder)
        except CheckpointException as error:
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
        return "loaded"


def masters_read_from_our_own_file(folder: str) -> list[str]:
    with parallel():
        training = build("fully_reshardable")
        made_up_step(training, 0)
        save(training, folder)
        return load_fp32_masters(training.ddp, folder, metadata("fully_reshardable"))


def whole(training, kind: str, folder: str) -> dict[str, torch.Tensor]:
    replicas = replicas_of(training.A_log)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas), replicas
    made_up_state(training)
    save(training, folder)
    held = tensors_in(folder)
    assert torch.equal(held[A_LOG], over_tp(training.A_log))
    return {"model": held[A_LOG], "master": held[master_key(kind)]}


def made_up_state(training) -> None:
    """Give an optimizer that was not loaded the state that its checkpoint format asks for."""
    adam = training.megatron_optimizer.optimizer
    if not adam.state:
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
