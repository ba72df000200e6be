"""Run on every rank: whole hybrid models, checkpoints of them, and pipeline stages."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
)

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.parallel import (
    VOCABULARY,
    hybrid_model,
    in_ddp,
    model_config,
    parallel,
    run_schedule,
)

PATTERN = "G-G-"
LENGTHS = (8, 24, 16)


def build_model(
    tp=1, cp=1, pp=1, sequence_parallel=False, dtype=torch.float32, **options
) -> HybridModel:
    ranks = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    stages = {"pipeline_model_parallel_size": pp, "pipeline_dtype": dtype}
    config = model_config(
        PATTERN, sequence_parallel=sequence_parallel, **ranks, **stages
    )
    pattern = PATTERN if pp == 1 else "G-|G-"
    spec = hybrid_stack_spec("local", **options)
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    return hybrid_model(config, pattern, spec, pre_process=first, post_process=last)


def metadata() -> dict:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(
            with_context_parallel=True
        ),
        "singleton_local_shards": False,
    }


def save(folder: str, tp: int, cp: int, options: dict) -> None:
    with parallel(tp=tp, cp=cp):
        model = build_model(tp, cp, **options)
        torch.manual_seed(3 + parallel_state.get_tensor_model_parallel_rank())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if getattr(parameter, "tensor_model_parallel", False):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "norm" in name or "bias" in name:
                    parameter.add_(
                        torch.arange(parameter.numel()).view_as(parameter) * 0.01
                    )
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata()), folder)


def load_and_gather(
    folder: str, tp: int, pp: int, options: dict
) -> dict[str, torch.Tensor]:
    """Every parameter of the loaded model, gathered whole, under its checkpoint
    name."""
    with parallel(tp=tp, pp=pp):
        model = build_model(tp, pp=pp, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        state = dist_checkpointing.load(
            model.sharded_state_dict(metadata=metadata()), folder
        )
        model.load_state_dict(state)
        group = parallel_state.get_tensor_model_parallel_group()
        stage_layers = (
            len(PATTERN) // pp * parallel_state.get_pipeline_model_parallel_rank()
        )
        gathered = {}
        for name, parameter in model.named_parameters():
            parts = [torch.empty_like(parameter) for _ in range(tp)]
            dist.all_gather(parts, parameter.detach().contiguous(), group=group)
            sharded = getattr(parameter, "tensor_model_parallel", False)
            name = global_name(name, stage_layers)
            if not sharded:
                assert all(torch.equal(part, parts[0]) for part in parts), name
                gathered[name] = parts[0]
            else:
                gathered[name] = join(model, name, parts, parameter)
        return gathered


def global_name(name: str, first_layer: int) -> str:
    words = name.split(".")
    if "layers" in words:
        at = words.index("layers") + 1
        words[at] = str(int(words[at]) + first_layer)
    return ".".join(words)


def join(model, name: str, parts: list[torch.Tensor], parameter) -> torch.Tensor:
    """Whole parameter of its tensor-parallel shares, section by section where it has
    sections."""
    dim = parameter.partition_dim
    gdn = next(m for m in model.modules() if hasattr(m, "in_proj_split_sections"))
    if ".in_proj." in name:
        sections = gdn.in_proj_split_sections
    else:
        sections = getattr(parameter, "partition_sizes", [parameter.shape[dim]])
    split = [part.split(list(sections), dim) for part in parts]
    return torch.cat([torch.cat(same, dim) for same in zip(*split, strict=True)], dim)


def one_step(
    folder: str,
    dtype: torch.dtype,
    tp=1,
    cp=1,
    pp=1,
    sequence_parallel=False,
    packed=False,
    **options,
) -> dict[str, float]:
    """Loss and squared norm of every gradient of one step through Megatron's schedule.

    Everything is computed in ``dtype``; so the loss is torch's, of logits gathered
    whole: Megatron's rounds to fp32.
    """
    with parallel(tp=tp, cp=cp, pp=pp):
        model = build_model(tp, cp, pp, sequence_parallel, dtype, **options)
        state = dist_checkpointing.load(
            model.sharded_state_dict(metadata=metadata()), folder
        )
        model.load_state_dict(state)
        model.to(dtype)
        model.config.finalize_model_grads_func = finalize_model_grads
        torch.manual_seed(11)
        tokens = torch.randint(0, VOCABULARY, (4, sum(LENGTHS) + 1))
        batches = tokens[:, None] if packed else tokens.view(2, 2, -1)
        rank = parallel_state.get_context_parallel_rank()
        held = local_indices(LENGTHS if packed else [sum(LENGTHS)], cp, rank)

        def forward_step(batches, model):
            batch = next(batches)
            labels = batch[:, 1:][:, held]
            params = thd(LENGTHS) if packed else None
            made = model(
                batch[:, :-1][:, held], held[None], None, packed_seq_params=params
            )

            def loss_function(logits_bsv):
                whole_bsV = gather_from_tensor_model_parallel_region(logits_bsv)
                total = F.cross_entropy(
                    whole_bsV.transpose(1, 2), labels, reduction="sum"
                )
                count = torch.tensor(labels.numel(), dtype=torch.int)
                return (
                    total,
                    count,
                    {"loss": torch.stack([total.detach(), count.to(total)])},
                )

            return made, loss_function

        reports = run_schedule(
            in_ddp(model), batches, forward_step, sum(LENGTHS), batches.shape[1]
        )
        total = sum((report["loss"] for report in reports), torch.zeros(2, dtype=dtype))
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        squares = {}
        first = len(PATTERN) // pp * parallel_state.get_pipeline_model_parallel_rank()
        for name, parameter in model.named_parameters():
            square = parameter.main_grad.double().square().sum()
            if getattr(parameter, "tensor_model_parallel", False):
                dist.all_reduce(
                    square, group=parallel_state.get_tensor_model_parallel_group()
                )
            squares[global_name(name, first)] = square.item()
        return {"loss": (total[0] / total[1]).item() if reports else None, **squares}


def leaves(state):
    """The tensors of a sharded state dict."""
    if isinstance(state, dict):
        for value in state.values():
            yield from leaves(value)
    elif isinstance(state, list):
        for value in state:
            yield from leaves(value)
    elif hasattr(
        state, "build"
    ):  # a ShardedTensorFactory, split into the keys it writes
        yield from leaves(state.build())
    else:
        yield state
