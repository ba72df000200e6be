"""A tiny bf16 hybrid model in Megatron's wrappers and optimizers, on the ranks of a
test."""

import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.transformer.module import Float16Module

from megatron_gdn.compat.checkpoints import leave_strides_out
from megatron_gdn.specs import hybrid_stack_spec
from megatron_gdn.specs.hybrid import GDN2_VARIANT
from tests import upstream
from tests.parallel import VOCABULARY, hybrid_model, in_ddp, model_config, run_schedule

# Megatron collects garbage in every save; what was imported until here is not worth
# searching.
gc.freeze()

PATTERN = "G-G-"
ADAM = {"lr": 1e-2, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
BATCH = 4
TOKENS = 17

DISTRIBUTED = ("fully_reshardable", "dp_reshardable")
FLOAT16 = "float16"
KINDS = (FLOAT16, *DISTRIBUTED)


@dataclass
class Training:
    """``kind``: the non-sharded optimizer, or the format of DistributedOptimizer's
    checkpoint."""

    kind: str
    ddp: DistributedDataParallel
    optimizer: Any

    @property
    def model(self):
        return self.ddp.module.module

    @property
    def megatron_optimizer(self):
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]

    @property
    def A_log(self) -> torch.nn.Parameter:
        """Of the first layer."""
        return self.model.decoder.layers[0].self_attention.A_log


def build(kind: str, ddp: dict | None = None, **options) -> Training:
    """``ddp``: settings of DistributedDataParallelConfig."""
    return wrap(kind, build_model(**options), **(ddp or {}))


def build_model(
    tp: int = 1,
    upstream_layer: bool = False,
    seed: int = 5,
    spec_options: dict | None = None,
    pattern: str = PATTERN,
    **sizes,
) -> HybridModel:
    """The same model on every rank and at every tp; ``upstream_layer`` takes Megatron's
    own GDN."""
    bf16 = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    config = model_config(pattern, tensor_model_parallel_size=tp, **bf16, **sizes)
    torch.manual_seed(seed)
    return hybrid_model(config, pattern, stack_of(upstream_layer, spec_options))


_earlier: list[DistributedDataParallel] = []


def _end_earlier_trainings() -> None:
    """Let go of models that are done with, and of the process groups that they hold.

    DistributedDataParallel is held by gradient hooks of its own parameters, out of
    sight of the garbage collector; and under gloo each of its twenty groups runs three
    threads.
    """
    for ddp in _earlier:
        vars(ddp).clear()
    _earlier.clear()
    gc.collect()


def wrap(kind: str, model: HybridModel, **ddp_settings) -> Training:
    """Float16Module, DistributedDataParallel and optimizer, as a training script
    would."""
    _end_earlier_trainings()
    config = model.config
    sharded = {"use_distributed_optimizer": kind != FLOAT16}
    model = Float16Module(config, model)
    ddp = in_ddp(model, grad_reduce_in_fp32=True, **sharded, **ddp_settings)
    _earlier.append(ddp)
    bf16 = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "weight_decay": 0.1,
        "clip_grad": 0.0,
    }
    optimizer_config = OptimizerConfig(optimizer="adam", **ADAM, **bf16, **sharded)
    optimizer = get_megatron_optimizer(
        optimizer_config,
        [ddp],
        config_overrides=get_standard_config_overrides(optimizer_config),
    )
    # as Megatron's scheduler does before the first step
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Training(kind, ddp, optimizer)


def stack_of(upstream_layer: bool, spec_options: dict | None = None):
    stack = hybrid_stack_spec("local", **(spec_options or {}))
    if not upstream_layer:
        return stack
    before = upstream.TESTING_UPSTREAM
    upstream.TESTING_UPSTREAM = True
    try:
        mixer = upstream.layer_spec()
    finally:
        upstream.TESTING_UPSTREAM = before
    layer = stack.submodules.gdn_layer
    layer = replace(layer, submodules=replace(layer.submodules, self_attention=mixer))
    stack = replace(stack, submodules=replace(stack.submodules, gdn_layer=layer))
    theirs = getattr(upstream.upstream_on_cpu(), "GatedDeltaNet2", None)
    if theirs is not None:
        parts = replace(layer.submodules, self_attention=replace(mixer, module=theirs))
        layers = {
            **stack.params["layers"],
            GDN2_VARIANT: replace(layer, submodules=parts),
        }
        stack = replace(stack, params={"layers": layers})
    return stack


def summed(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A loss as Megatron's schedule takes it: the sum, of how many tokens, and what is
    logged."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, total.detach()


def train_step(training: Training, step: int) -> float:
    """One step on batch number ``step``, shared by the data-parallel ranks; its mean
    loss."""
    group = parallel_state.get_data_parallel_group()
    torch.manual_seed(100 + step)
    batch = torch.randint(0, VOCABULARY, (BATCH, TOKENS)).chunk(group.size())[
        group.rank()
    ]

    def forward_step(batches, model):
        rows = next(batches)
        positions = torch.arange(TOKENS - 1).expand(len(rows), -1)
        return model(rows[:, :-1], positions, None, labels=rows[:, 1:]), summed

    training.ddp.zero_grad_buffer()
    training.optimizer.zero_grad()
    (total,) = run_schedule(training.ddp, [batch], forward_step, TOKENS - 1, len(batch))
    dist.all_reduce(total, group=group)
    training.optimizer.step()
    return (total / (BATCH * (TOKENS - 1))).item()


def made_up_step(training: Training, step: int) -> None:
    """An optimizer step without a forward pass: gradients drawn from each parameter's
    name."""
    training.ddp.zero_grad_buffer()
    training.optimizer.zero_grad()
    for name, parameter in training.model.named_parameters():
        parameter.main_grad.copy_(made_up_gradient(name, parameter, step))
    training.optimizer.step()


def made_up_gradient(name: str, parameter: torch.Tensor, step: int) -> torch.Tensor:
    torch.manual_seed(step + sum(map(ord, name)))
    return torch.randn(parameter.shape)


def metadata(kind: str) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    common = {"dp_cp_group": group, "singleton_local_shards": False}
    return common if kind == FLOAT16 else common | {"distrib_optim_sharding_type": kind}


def sharded_state(training: Training, is_loading: bool = False) -> dict[str, Any]:
    model = training.model.sharded_state_dict(metadata=metadata(training.kind))
    optimizer = training.optimizer.sharded_state_dict(
        model, is_loading, metadata=metadata(training.kind)
    )
    return {"model": model, "optimizer": optimizer}


def save(training: Training, folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    dist_checkpointing.save(sharded_state(training), folder)


def save_by_name(training: Training, folder: str) -> None:
    """Save under the parameters' names, whatever the format of the run is: files that
    compare."""
    kind = FLOAT16 if training.kind == FLOAT16 else "fully_reshardable"
    save(replace(training, kind=kind), folder)


def load(training: Training, folder: str) -> None:
    state = dist_checkpointing.load(sharded_state(training, is_loading=True), folder)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


def load_model_only(training: Training, folder: str) -> None:
    model = training.model.sharded_state_dict(metadata=metadata(training.kind))
    training.model.load_state_dict(
        dist_checkpointing.load({"model": model}, folder)["model"]
    )
    training.optimizer.reload_model_params()


def tensors_in(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole; also while the package's wrappers are
    off."""
    original = TorchDistLoadShardedStrategy.load_tensors_metadata

    def read(strategy, *args):
        return leave_strides_out(original, strategy, *args)

    with mock.patch.object(TorchDistLoadShardedStrategy, "load_tensors_metadata", read):
        everything = dist_checkpointing.load_plain_tensors(folder)
    return {
        key: value
        for key, value in everything.items()
        if isinstance(value, torch.Tensor)
    }


def over_tp(local: torch.Tensor) -> torch.Tensor:
    """A parameter that is split along its first dimension, whole."""
    return torch.cat(_gathered(local, parallel_state.get_tensor_model_parallel_group()))


def replicas_of(local: torch.Tensor) -> list[torch.Tensor]:
    """What each data-parallel rank holds of a parameter."""
    return _gathered(local, parallel_state.get_data_parallel_group())


def _gathered(local: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.detach().contiguous(), group=group)
    return parts


def shares(training: Training) -> dict[str, torch.Tensor]:
    """Copies of all parameters, and of this rank's shares of their masters and Adam's
    state."""
    optimizer = training.megatron_optimizer
    adam = optimizer.optimizer
    found = {}
    for name, parameter in training.model.named_parameters():
        found[name] = parameter
        if parameter in optimizer.model_param_group_index_map:
            group, index = optimizer.model_param_group_index_map[parameter]
            master = adam.param_groups[group]["params"][index]
            state = adam.state.get(master, {})
            found |= {
                f"{name} {key}": value
                for key, value in [("master", master), *state.items()]
            }
    return {key: value.detach().clone() for key, value in found.items()}


def raised(call) -> str | None:
    """The exception that the call raises, if any."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
