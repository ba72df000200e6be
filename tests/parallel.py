"""Building Megatron things inside a rank: parallel state, configs, layers with known
weights."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.mixers.tensor_map import take_share
from megatron_gdn.ops.layout import layout_of_in_proj
from megatron_gdn.specs import hybrid_stack_spec

SIZES = {
    "hidden_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "mamba_num_heads": 8,
    "mamba_num_groups": 2,
    "mamba_head_dim": 6,
    "mamba_state_dim": 5,
}
VOCABULARY = 32


def make_config(**changes) -> TransformerConfig:
    settings = {
        "num_layers": 1,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        # of no meaning to our layer; upstream's accepts no other
        "activation_func": F.silu,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "init_method_std": 0.2,
        "calculate_per_token_loss": True,
        **SIZES,
    }
    exact = changes.pop("batch_invariant_mode", False)
    config = TransformerConfig(**{**settings, **changes})
    # Set afterwards: Megatron checks the mode with attention kernels and a dtype in
    # mind that no test on a CPU has. The layers read the field alone.
    config.batch_invariant_mode = exact
    return config


def model_config(pattern: str, **changes) -> TransformerConfig:
    """Of a small hybrid model of these layers, without dropout."""
    settings = {"ffn_hidden_size": 32, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return make_config(**{"num_layers": len(pattern), **settings, **changes})


def hybrid_model(config, pattern: str, spec=None, **options) -> HybridModel:
    settings = {"vocab_size": VOCABULARY, "max_sequence_length": 64, **options}
    spec = spec or hybrid_stack_spec("local")
    return HybridModel(config, spec, hybrid_layer_pattern=pattern, **settings)


def run_schedule(
    model: DistributedDataParallel, batches, forward_step, tokens: int, rows: int = 1
):
    """Forward and backward by Megatron's schedule; what the losses of the micro-batches
    report."""
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=tokens,
        micro_batch_size=rows,
        forward_only=False,
    )


@contextmanager
def parallel(tp=1, cp=1, pp=1, seed=1234, **sizes):
    """Megatron's parallel state over the world, gone afterwards; over gloo a few
    stay."""
    torch.manual_seed(seed)
    blank = _globals()
    key = (tp, cp, pp, *sorted(sizes.items()))
    kept = _kept.pop(key, None)
    if kept is None:
        before = _groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            **sizes,
        )
        kept = (_globals(), [group for group in _groups() if group not in before])
    else:
        vars(parallel_state).update(_copies(kept[0]))
    _kept[key] = kept
    model_parallel_cuda_manual_seed(seed)
    try:
        yield
    finally:
        vars(parallel_state).update(blank)
        # Megatron keeps one table of heads' losses per process, as long as the first
        # model's heads.
        MTPLossLoggingHelper.tracker.clear()
        end_groups(keep=_KEEP if dist.get_backend() == "gloo" else 0)


# The latest; every rank sees the same sequence of them. A state's groups run some 50
# threads.
_KEEP = 4
_kept: dict[tuple, tuple[dict[str, object], list[dist.ProcessGroup]]] = {}


def end_groups(keep: int = 0) -> None:
    """End all groups but those of the latest states: Megatron forgets its groups, no
    more."""
    while len(_kept) > keep:
        del _kept[next(iter(_kept))]
    stay = [dist.group.WORLD, *_own_group.values()]
    stay += [group for _, groups in _kept.values() for group in groups]
    for group in _groups():
        if group not in stay:
            dist.destroy_process_group(group)


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _globals() -> dict[str, object]:
    """All that Megatron's module of the parallel state knows."""
    known = vars(parallel_state).items()
    return _copies(
        {k: v for k, v in known if k[0] == "_" and k[1] != "_" and not callable(v)}
    )


def _copies(values: dict[str, object]) -> dict[str, object]:
    return {k: v.copy() if isinstance(v, list | dict) else v for k, v in values.items()}


_own_group: dict[int, dist.ProcessGroup] = {}


def group_of_one() -> dist.ProcessGroup:
    """A group that holds this rank alone (made once per process, by all ranks
    together)."""
    rank = dist.get_rank()
    if rank not in _own_group:
        for other in range(dist.get_world_size()):
            group = dist.new_group([other])
            if other == rank:
                _own_group[rank] = group
    return _own_group[rank]


def alone() -> ProcessGroupCollection:
    return ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())


def groups_of_megatron() -> ProcessGroupCollection:
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])


def in_ddp(layer: torch.nn.Module, **settings) -> DistributedDataParallel:
    """Megatron's wrapper with these settings of DistributedDataParallelConfig."""
    return DistributedDataParallel(
        layer.config, DistributedDataParallelConfig(**settings), layer
    )


def reduce_gradients(ddp: DistributedDataParallel) -> None:
    """What Megatron does to them at the end of a backward."""
    ddp.finish_grad_sync()
    _allreduce_non_tensor_model_parallel_grads([ddp], ddp.config)


# Of Kimi Delta Attention: what every tensor-parallel rank has whole.
WHOLE = ("out_norm.", "beta_proj.", "f_a_proj.", "g_a_proj.")


def share_of(name: str, whole: torch.Tensor, mixer) -> torch.Tensor:
    """This tensor-parallel rank's share of a whole parameter of a mixer (or of its
    gradient)."""
    return share_of_rank(
        name, whole, mixer.global_dims, mixer.tp_group.rank(), mixer.tp_group.size()
    )


def share_of_rank(
    name: str, whole: torch.Tensor, dims, rank: int, size: int
) -> torch.Tensor:
    """``dims`` are those of the mixer on one rank."""
    if name.startswith(WHOLE) or name == "out_proj.bias":
        return whole
    dim = 0
    sections = (whole.shape[0],)
    if name.startswith("in_proj."):
        sections = layout_of_in_proj(dims).widths
    elif name.startswith("conv1d"):
        sections = dims.layout.conv_widths
    elif name == "out_proj.weight":
        dim = 1
        sections = (dims.layout.mixed_width,)
    return take_share(whole, dim, sections, rank, size)


def assert_close(
    name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> None:
    """Largest difference against the largest entry: what rounding errors of sums scale
    with."""
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    error = (
        (actual.double() - expected.double()).abs().max().item()
        if actual.numel()
        else 0.0
    )
    assert error <= tolerance * max(scale, 1e-30), f"{name}: {error:.3e} of {scale:.3e}"
