"""A hybrid model under Megatron-FSDP and DDP, over nccl, or over gloo behind stand-ins
for CUDA."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    torch_fully_sharded_data_parallel,
)
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    handle_fp8_extra_state_case,
    handle_gdn_in_state_dict,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megatron_gdn.mixers import precision
from tests.fsdp_on_cpu import (
    MeshOfCPUs,
    fill_states_of_empty_shards,
    one_collective_at_a_time,
)
from tests.gpu.parallel_laws import DEVICE, KINDS, rms
from tests.parallel import VOCABULARY, hybrid_model, in_ddp, model_config, parallel
from tests.precision.training import stack_of

PATTERN = "G-M-"
ROWS = 4
TOKENS = 16
STEPS = 3
SIZES = {**KINDS["gdn"].sizes, **KINDS["mamba2"].sizes} if DEVICE == "cuda" else {}
MEGATRONS_COPY = "megatron.core.distributed.fsdp.src.megatron_fsdp"
# the strategy that shards parameters, so that it gathers them
FULLY = "optim_grads_params"


def require_exact_in_fp32(ddp: list[torch.Tensor], fsdp: list[torch.Tensor]) -> None:
    """Losses of all ranks in fp32: both wrappers sum the same gradients.

    Two addends have one sum; what is left is how the updates of cut tensors round.
    """
    torch.testing.assert_close(torch.stack(fsdp), torch.stack(ddp), rtol=1e-5, atol=0)


def require_as_exact_as_ddp(
    truth: list[torch.Tensor], ddp: list[torch.Tensor], fsdp: list[torch.Tensor]
) -> None:
    """Losses of all ranks in bf16, against ``truth`` in fp32: another draw of the same
    error."""
    error, yardstick = (rms(torch.stack(x) - torch.stack(truth)) for x in (fsdp, ddp))
    print(
        f"error of Megatron-FSDP {error:.2e}, of DistributedDataParallel "
        f"{yardstick:.2e}"
    )
    assert error <= 2 * yardstick, (error, yardstick)


def losses(
    wrapper: str,
    dtype: torch.dtype,
    pattern: str = PATTERN,
    strategy: str = FULLY,
    tp: int = 1,
    norms_called: bool = False,
) -> torch.Tensor:
    """``[STEPS, rows, TOKENS]`` of this rank under "ddp" or "fsdp", from weights of
    bf16."""
    with parallel(tp=tp), on_this_device():
        model = build(torch.bfloat16, pattern, tensor_model_parallel_size=tp)
        if dtype == torch.float32:
            rounded = model
            model = build(dtype, pattern, tensor_model_parallel_size=tp)
            model.load_state_dict(rounded.state_dict())
        for name, module in model.named_modules():
            if norms_called and name.endswith("out_norm"):
                module.register_forward_hook(lambda *call: None)
        return torch.stack(list(_train(*_wrap(wrapper, model, strategy))))


def losses_of_a_package(
    package: str,
    dtype: torch.dtype,
    pattern: str,
    strategy: str,
    device: str = DEVICE,
    rounded: bool = False,
) -> torch.Tensor:
    """`losses` with torch's SGD under ``package.fully_shard``; "none" sums
    gradients."""
    with parallel(), on_this_device(MEGATRONS_COPY if package == "none" else package):
        on_meta = {"init_model_with_meta_device": device == "meta"}
        settings = {"use_cpu_initialization": False, **on_meta}
        with torch.device(device):
            first = build(torch.bfloat16 if rounded else dtype, pattern, **settings)
            model = build(dtype, pattern, **settings) if rounded else first
            if rounded:
                model.load_state_dict(first.state_dict())
        if dtype == torch.bfloat16:
            model = Float16Module(model.config, model)
        # Not Adam: fully_shard takes a step with zero gradients, which Adam counts.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if package == "none":
            return torch.stack(list(_steps(model, optimizer, _sum)))
        groups = [
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_tensor_model_parallel_group(),
        ]
        mesh = dist.DeviceMesh.from_group(
            groups,
            DEVICE,
            mesh_dim_names=("dp", "tp"),
            mesh=[[rank] for rank in range(groups[0].size())],
        )
        wrapped, optimizer = import_module(package).fully_shard(
            model,
            optimizer,
            device_mesh=mesh,
            dp_shard_dim="dp",
            tp_dim="tp",
            fsdp_unit_modules=[TransformerLayer, MambaLayer]
            if strategy == FULLY
            else [],
            zero_dp_strategy=strategy,
            calculate_per_token_loss=True,
            device=torch.device(DEVICE),
            init_model_with_meta_device=device == "meta",
        )
        return torch.stack(list(_steps(wrapped, optimizer, lambda model: None)))


def _sum(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def losses_of_a_model_built_on(
    device: str, pattern: str, strategy: str
) -> torch.Tensor:
    """`losses` under Megatron-FSDP, in fp32, with the weights that the model begins
    with."""
    with parallel(), on_this_device():
        with torch.device(device):
            model = build(
                torch.float32,
                pattern,
                use_cpu_initialization=False,
                init_model_with_meta_device=device == "meta",
            )
        return torch.stack(list(_train(*_wrap("fsdp", model, strategy))))


def losses_one_gather_at_a_time(dtype: torch.dtype) -> torch.Tensor:
    """`losses` under Megatron-FSDP, with every dtype gathered by itself."""
    with patch.object(param_and_grad_buffer, "_coalescing_manager", _one_by_one):
        return losses_if_accepted(dtype)


def losses_if_accepted(dtype: torch.dtype) -> torch.Tensor:
    """`losses` under Megatron-FSDP without the layer's refusal."""
    with patch.object(
        precision, "prepare_fsdp_for_mixed_dtypes", lambda name, parameter: None
    ):
        return losses("fsdp", dtype)


def gradient_norm(wrapper: str) -> torch.Tensor:
    """Of the first step in bf16; the loss is a mean over tokens and ranks, as
    Megatron's scripts have it."""
    with parallel(), on_this_device():
        model = build(torch.bfloat16, PATTERN, calculate_per_token_loss=False)
        wrapped, optimizer = _wrap(wrapper, model, FULLY, clip_grad=1e9)
        rows, positions = next(_batches())
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(rows[:, :-1], positions, None, labels=rows[:, 1:]).mean().backward()
        finalize_model_grads([wrapped])
        _, norm, _ = optimizer.step()
        return torch.tensor(float(norm))


def gradient_norm_as_over_nccl() -> torch.Tensor:
    """`gradient_norm` under Megatron-FSDP over gloo that calls itself nccl, with every
    collective by itself."""
    with (
        patch.object(param_and_grad_buffer, "_coalescing_manager", _one_by_one),
        patch.object(dist, "get_backend", lambda group=None: "nccl"),
    ):
        return gradient_norm("fsdp")


def reduced_together() -> torch.Tensor:
    """A sum and a maximum over two ranks, in one joined collective of torch."""
    with parallel():
        given = torch.tensor([1.0, 1.0]) + dist.get_rank()
        found = torch.zeros(2)
        with dist._coalescing_manager(dist.group.WORLD):
            for i, op in enumerate((dist.ReduceOp.SUM, dist.ReduceOp.MAX)):
                dist.reduce_scatter_tensor(found[i : i + 1], given, op=op)
        return found


def losses_after_a_save(
    folder: str,
    split: bool,
    tp: int = 1,
    pattern: str = PATTERN,
    upstream: bool = False,
) -> torch.Tensor:
    """`losses` in bf16 after the first step, which saves a checkpoint, by section if
    ``split``."""
    with parallel(tp=tp), on_this_device(), _script_of(split):
        wrapped, optimizer = _bf16_run(tp, pattern, upstream, offset=0.0)
        steps = _train(wrapped, optimizer)
        next(steps)
        stored, _ = _fsdp_dtensors(wrapped, optimizer, split)
        checkpoint.save(stored, checkpoint_id=folder)
        return torch.stack(list(steps))


def losses_after_a_load(
    folder: str,
    split: bool,
    tp: int = 1,
    pattern: str = PATTERN,
    upstream: bool = False,
    strict: bool = True,
) -> torch.Tensor:
    """The same, of a model with other weights that loads this checkpoint."""
    with parallel(tp=tp), on_this_device(), _script_of(split):
        wrapped, optimizer = _bf16_run(tp, pattern, upstream, offset=1.0)
        stored, state = _fsdp_dtensors(wrapped, optimizer, split, is_loading=True)
        as_megatron = checkpoint.DefaultLoadPlanner(allow_partial_load=not strict)
        checkpoint.load(stored, checkpoint_id=folder, planner=as_megatron)
        wrapped.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return torch.stack(list(_train(wrapped, optimizer, first=1)))


def refusal_of_a_load(folder: str, split: bool, tp: int, pattern: str) -> str:
    """What the mixer says of this checkpoint."""
    try:
        losses_after_a_load(folder, split, tp, pattern, strict=False)
    except ValueError as error:
        return str(error)
    return "accepted"


def _script_of(split: bool):
    """Megatron's script of checkpoints, which has the function that cuts ``in_proj`` or
    has not."""
    name = "megatron.training.checkpointing"
    cut = handle_gdn_in_state_dict
    script = SimpleNamespace(**({"handle_gdn_in_state_dict": cut} if split else {}))
    return patch.dict(sys.modules, {name: script})


def _bf16_run(tp: int, pattern: str, upstream: bool, offset: float):
    """Model and optimizer; ``offset`` is added to the weights that the model begins
    with."""
    # What torch remembers of operations on equal meshes names groups that have ended.
    _clear_sharding_prop_cache()
    model = build(
        torch.bfloat16, pattern, upstream=upstream, tensor_model_parallel_size=tp
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(offset)
    return _wrap("fsdp", model, "optim_grads")


def keys_of(folder: str) -> list[str]:
    return list(checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata)


def _fsdp_dtensors(
    wrapped, optimizer, split: bool, is_loading: bool = False
) -> tuple[dict[str, dict], dict[str, dict]]:
    """What ``--ckpt-format fsdp_dtensor`` stores, and the state whose tensors these
    are."""
    fill_states_of_empty_shards(optimizer.optimizer)
    state = {
        "model": wrapped.module.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.sharded_state_dict(
            {},
            is_loading=is_loading,
            metadata={"distrib_optim_sharding_type": "fsdp_dtensor"},
        ),
    }
    handle_fp8_extra_state_case(state["model"])
    stored = {name: part.copy() for name, part in state.items()}
    if split:
        parts = handle_gdn_in_state_dict(
            wrapped.module, stored["model"], stored["optimizer"]
        )
        stored = dict(zip(stored, parts, strict=True))
    preprocess_state_dict_for_uneven_dtensor(stored)
    return stored, state


def refusal(dtype: torch.dtype, pattern: str, package: str = "") -> str:
    try:
        if package:
            losses_of_a_package(package, dtype, pattern, FULLY)
        else:
            losses("fsdp", dtype, pattern)
    except NotImplementedError as error:
        return str(error)
    return "accepted"


def build(
    dtype: torch.dtype, pattern: str, upstream: bool = False, **settings: bool | int
) -> HybridModel:
    torch.manual_seed(5)
    dtypes = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    config = model_config(pattern, **dtypes, **SIZES, **settings)
    rules = {"backend": "reference"} if dtype == torch.float32 else {}
    model = hybrid_model(config, pattern, stack_of(upstream, rules))
    return model if config.init_model_with_meta_device else model.to(DEVICE)


def _wrap(wrapper: str, model: HybridModel, strategy: str, clip_grad: float = 0.0):
    """Model and optimizer, as Megatron's training script makes them."""
    config = model.config
    module = Float16Module(config, model) if config.bf16 else model
    if wrapper == "ddp":
        wrapped = in_ddp(
            module, grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
    else:
        overlap = strategy in (FULLY, "optim_grads")
        settings = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
            megatron_fsdp_main_grads_dtype=torch.float32,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
            overlap_grad_reduce=overlap,
        )
        wrapped = mcore_fsdp_adapter.FullyShardedDataParallel(
            config,
            settings,
            module,
            device=None if DEVICE == "cuda" else torch.device(DEVICE),
        )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.0,
            clip_grad=clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [wrapped],
    )
    return wrapped, optimizer


def _train(model, optimizer, first: int = 0) -> Iterator[torch.Tensor]:
    for rows, positions in _batches(first):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        per_token = model(rows[:, :-1], positions, None, labels=rows[:, 1:]).float()
        per_token.sum().backward()
        finalize_model_grads([model], torch.tensor(per_token.numel(), device=DEVICE))
        optimizer.step()
        yield per_token.detach().cpu()


def _steps(
    model, optimizer, reduce: Callable[[torch.nn.Module], None]
) -> Iterator[torch.Tensor]:
    """As `_train`, without Megatron's optimizer."""
    for rows, positions in _batches():
        optimizer.zero_grad()
        per_token = model(rows[:, :-1], positions, None, labels=rows[:, 1:]).float()
        (per_token.sum() / (ROWS * TOKENS)).backward()
        reduce(model)
        optimizer.step()
        yield per_token.detach().cpu()


def _batches(first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and positions of this rank's rows, step by step from ``first``."""
    group = parallel_state.get_data_parallel_group()
    positions = torch.arange(TOKENS, device=DEVICE).expand(ROWS // group.size(), -1)
    for step in range(first, STEPS):
        torch.manual_seed(100 + step)
        drawn = torch.randint(VOCABULARY, (ROWS, TOKENS + 1))
        yield drawn.chunk(group.size())[group.rank()].to(DEVICE), positions


@contextmanager
def _one_by_one(
    group: dist.ProcessGroup, async_ops: bool = False
) -> Iterator[SimpleNamespace]:
    """A coalescing manager that runs every all-gather inside it by itself."""
    gather = dist.all_gather_into_tensor

    def wait_for(*args, **kwargs):
        gather(*args, **{**kwargs, "async_op": False})

    with patch.object(dist, "all_gather_into_tensor", wait_for):
        yield SimpleNamespace(wait=lambda: None)


@contextmanager
def on_this_device(package: str = MEGATRONS_COPY) -> Iterator[None]:
    """Without a GPU: what Megatron's FSDPs, or ``package``, ask of CUDA, answered with
    the CPU."""
    if DEVICE == "cuda":
        yield
        return
    stream = type(torch.cuda.current_stream())
    event = torch.cuda.Event
    cpu = torch.device("cpu")
    buffers = import_module(f"{package}.param_and_grad_buffer")
    with ExitStack() as stack:
        for owner, name, answer in (
            (torch.Tensor, "cuda", lambda self, *device: self),
            (torch.cuda, "Stream", stream),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (stream, "record_event", lambda self: event()),
            (
                import_module(f"{package}.megatron_fsdp"),
                "torch",
                _Torch(device=lambda name: cpu),
            ),
            (
                buffers,
                "_coalescing_manager",
                one_collective_at_a_time(buffers._coalescing_manager),
            ),
            (mcore_fsdp_adapter, "DeviceMesh", MeshOfCPUs),
            (torch_fully_sharded_data_parallel, "DeviceMesh", MeshOfCPUs),
        ):
            stack.enter_context(patch.object(owner, name, answer, create=True))
        yield


class _Torch:
    """torch, but for these names."""

    def __init__(self, **names: Callable) -> None:
        vars(self).update(names)

    def __getattr__(self, name: str):
        return getattr(torch, name)
