"""Run on every rank of a nccl world: one step of a whole hybrid model on Transformer
Engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.tensor_map import take_share
from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.distributed.model_laws import global_name
from tests.gpu.parallel_laws import DEVICE, GPU
from tests.parallel import hybrid_model, in_ddp, model_config, parallel, run_schedule

PATTERN = "G-*-"  # a pipeline's stages are its halves
VOCABULARY = 64
TOKENS = 512
LENGTHS = (64, 192, 8, 248)
MICRO_BATCHES = 2


def build_model(
    modules: str, dtype: torch.dtype, layout: dict, options: dict
) -> HybridModel:
    """The same weights on every rank of every layout: drawn whole, by name, and cut."""
    pp = layout.get("pp", 1)
    config = model_config(
        PATTERN,
        tensor_model_parallel_size=layout.get("tp", 1),
        context_parallel_size=layout.get("cp", 1),
        pipeline_model_parallel_size=pp,
        sequence_parallel=layout.get("sequence_parallel", False),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        ffn_hidden_size=512,
        gated_linear_unit=True,
        add_bias_linear=False,
        cp_comm_type="p2p",
        **GPU,
    )
    half = len(PATTERN) // 2
    pattern = PATTERN if pp == 1 else f"{PATTERN[:half]}|{PATTERN[half:]}"
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": TOKENS}
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    stage = {"pre_process": first, "post_process": last}
    model = hybrid_model(
        config, pattern, hybrid_stack_spec(modules, **options), **sizes, **stage
    )
    model = model.to(DEVICE)
    first = half * parallel_state.get_pipeline_model_parallel_rank() if pp > 1 else 0
    _fill(model, first)
    return model


def _fill(model: HybridModel, first_layer: int) -> None:
    tp = parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole_name = global_name(name, first_layer)
            if whole_name.endswith(("A_log", "dt_bias")):
                scale = 0.1
                offset = 0.0
            elif "norm" in whole_name:
                scale = 0.1
                offset = 1.0
            else:
                scale = 0.06
                offset = 0.0
            shape = list(parameter.shape)
            if getattr(parameter, "tensor_model_parallel", False):
                shape[parameter.partition_dim] *= tp
            seed = torch.Generator().manual_seed(sum(map(ord, whole_name)))
            whole = torch.randn(shape, generator=seed) * scale + offset
            whole = whole.bfloat16().float()  # what models of both dtypes can hold
            parameter.copy_(_share_of(whole, name, parameter, model))


def _share_of(
    whole: torch.Tensor, name: str, parameter: torch.Tensor, model: HybridModel
) -> torch.Tensor:
    """This tensor-parallel rank's share of a whole parameter, or of its gradient."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    gdn = [m for m in model.modules() if hasattr(m, "in_proj_split_sections")]
    dim = parameter.partition_dim
    sections = _sections(name, parameter, gdn)
    return take_share(whole, dim, [n * tp for n in sections], rank, tp)


def _sections(name: str, parameter: torch.Tensor, gdn: list) -> list[int]:
    """Sizes, on this rank, of what is cut one by one along the parameter's split
    dimension."""
    if ".in_proj." in name and gdn:
        return list(gdn[0].in_proj_split_sections)
    if "linear_fc1" in name:  # gate and up
        return [parameter.shape[0] // 2] * 2
    return list(
        getattr(
            parameter, "partition_sizes", [parameter.shape[parameter.partition_dim]]
        )
    )


def one_step(
    modules: str,
    dtype: torch.dtype,
    packed: bool,
    layout: dict | None = None,
    options: dict | None = None,
    truth: dict[str, torch.Tensor] | None = None,
) -> dict:
    """Of one step by Megatron's schedule: losses per token (on the last stage), where
    they stand, this rank's gradients, and the norms of the whole gradients' differences
    from ``truth``."""
    layout = layout or {}
    options = options or {}
    sizes = {k: v for k, v in layout.items() if k in ("tp", "cp", "pp")}
    with parallel(**sizes):
        model = build_model(modules, dtype, layout, options)
        config = model.config
        ddp = in_ddp(model, grad_reduce_in_fp32=True)
        config.finalize_model_grads_func = finalize_model_grads
        generator = torch.Generator().manual_seed(11)
        rows = 1 if packed else 2
        shape = (MICRO_BATCHES, rows, TOKENS + 1)
        batches = torch.randint(0, VOCABULARY, shape, generator=generator).to(DEVICE)
        cp = layout.get("cp", 1)
        rank = parallel_state.get_context_parallel_rank()
        cut = options.get("cp_layout", "zigzag")
        held = local_indices(LENGTHS if packed else [TOKENS], cp, rank, cut).to(DEVICE)
        kept = []

        def forward_step(batches, model):
            batch = next(batches)
            losses = model(
                batch[:, :-1][:, held],
                held[None].expand(rows, -1),
                None,
                labels=batch[:, 1:][:, held],
                packed_seq_params=thd(LENGTHS, DEVICE) if packed else None,
            )

            def loss_function(losses):
                kept.append(losses.detach().float().cpu())
                count = torch.tensor(losses.numel(), dtype=torch.int, device=DEVICE)
                return losses.float().sum(), count, {}

            return losses, loss_function

        run_schedule(ddp, batches, forward_step, TOKENS, rows)
        pp = layout.get("pp", 1)
        first = len(PATTERN) // pp * parallel_state.get_pipeline_model_parallel_rank()
        gradients = {}
        errors = {}
        for name, parameter in model.named_parameters():
            whole_name = global_name(name, first)
            gradients[whole_name] = parameter.main_grad.float().cpu()
            if truth is None:
                continue
            true = (
                _share_of(truth[whole_name], name, parameter, model).to(DEVICE).double()
            )
            square = (parameter.main_grad - true).square().sum()
            if getattr(parameter, "tensor_model_parallel", False):
                dist.all_reduce(
                    square, group=parallel_state.get_tensor_model_parallel_group()
                )
            errors[whole_name] = square.sqrt().item()
        losses = torch.stack(kept) if kept else None
        return {
            "losses": losses,
            "held": held.cpu(),
            "gradients": gradients,
            "errors": errors,
        }
