"""Run on every rank: checkpoints between our layer and Megatron's own, which keeps bf16."""

import io
from unittest import mock

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gdn.compat import observe
from megatron_gdn.compat.mixed_dtype_optimizers import (
    repair_mixed_dtype_optimizers,
    restore_mixed_dtype_optimizers,
)
from megatron_gdn.compat.observe import log_once
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


def said_when_saved(kind: str, folder: str, as_torch_file: bool = False) -> list[str]:
    """The log lines of a save that tell how Megatron's own layer can go on."""
    said: list[str] = []
    log_once.cache_clear()
    with (
        parallel(),
        mock.patch.object(observe, "log_single_rank", lambda *args: said.append(args[2])),
    ):
        training = build(kind)
        made_up_step(training, 0)
        if as_torch_file:
            training.optimizer.save_parameter_state(f"{folder}/optimizer.pt")
        else:
            save(training, folder)
    return [line for line in said if "Megatron's own layer" in line]


def switch_by_a_plain_state(upstream_first: bool) -> list[str]:
    """Three steps, then the other layer by Megatron's plain state dicts; what it holds otherwise.

    Our layer's process has this package's wrappers, that of Megatron's own layer has not.
    """
    with parallel():
        first = build(FLOAT16, upstream_layer=upstream_first)
        for step in range(3):
            made_up_step(first, step)
        expected, file = optimizer_by_name(first), io.BytesIO()
        model = first.model.state_dict()
        torch.save({"model": model, "optimizer": first.optimizer.state_dict()}, file)
        second = build(FLOAT16, upstream_layer=not upstream_first, seed=99)
        if not upstream_first:
            restore_mixed_dtype_optimizers()
        try:
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            second.model.load_state_dict(state["model"])
            second.optimizer.load_state_dict(state["optimizer"])
        finally:
            repair_mixed_dtype_optimizers()
        found = optimizer_by_name(second)
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


def optimizer_by_name(training) -> dict[str, torch.Tensor]:
    """Masters and Adam's averages, each under its parameter's name."""
    optimizer, found = training.megatron_optimizer, {}
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    masters = {p: p for group in optimizer.fp32_from_fp32_groups for p in group}
    for half, full in zip(
        optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
    ):
        masters |= dict(zip(half, full, strict=True))
    for parameter, master in masters.items():
        found[f"{names[parameter]} master"] = master.detach().clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{names[parameter]} {kind}"] = optimizer.optimizer.state[master][kind].clone()
    return found


def a_list_of_another_model() -> str:
    with parallel():
        state = build(FLOAT16, pattern="G-").optimizer.state_dict()
        try:
            build(FLOAT16).megatron_optimizer.load_state_dict(state)
        except ValueError as error:
            return str(error)
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
