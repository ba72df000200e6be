"""Builds the Megatron HybridModel, its data-parallel wrapper, optimizer and
schedule."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_gdn.specs import hybrid_stack_spec
from pretraining import hf_model


@dataclass
class Training:
    """The objects that a training step reads and a checkpoint holds."""

    model: Any
    optimizer: Any
    scheduler: Any
    config: Any


def build_training(args: argparse.Namespace) -> Training:
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

    if args.hf_config:
        model, config = hf_model.build(args)
    else:
        config = model_config(args)
        model = build_model(args, config)
    if model.post_process:
        model.output_layer.register_forward_hook(
            partial(_leave_out_padding, args.vocab_size)
        )
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    if args.bf16:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    model = DistributedDataParallel(config, ddp_config(args), model)
    model.broadcast_params()
    optimizer, scheduler = build_optimizer(args, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Training(model, optimizer, scheduler, config)


def model_config(args: argparse.Namespace):
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        linear_num_key_heads=args.linear_num_key_heads,
        linear_num_value_heads=args.linear_num_value_heads,
        linear_key_head_dim=args.linear_key_head_dim,
        linear_value_head_dim=args.linear_value_head_dim,
        linear_conv_kernel_dim=args.linear_conv_kernel_dim,
        mamba_num_heads=args.mamba_num_heads,
        mamba_head_dim=args.mamba_head_dim,
        mamba_state_dim=args.mamba_state_dim,
        mamba_num_groups=args.mamba_num_groups,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        transformer_impl=args.transformer_impl,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # The mean over tokens, not over micro-batches: padding makes their counts
        # differ.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        deterministic_mode=args.deterministic,
        use_cpu_initialization=not torch.cuda.is_available(),
    )


def build_model(args: argparse.Namespace, config: Any):
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    tp = args.tensor_model_parallel_size
    return HybridModel(
        config,
        hybrid_stack_spec(
            "te" if args.transformer_impl == "transformer_engine" else "local"
        ),
        # The embedding is cut over tensor ranks; eight keeps matrix sizes even.
        vocab_size=-(-args.vocab_size // (8 * tp)) * 8 * tp,
        max_sequence_length=args.seq_length,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope" if "*" in args.hybrid_layer_pattern else "none",
    )


def _leave_out_padding(
    vocab_size: int, layer: Any, inputs: Any, outputs: tuple[Tensor, Any]
):
    """A hook of the output layer: logits of the vocabulary's padding are -inf.

    The number of padding rows depends on the number of tensor ranks; the loss must not.
    """
    logits, bias = outputs
    columns = torch.arange(logits.shape[-1], device=logits.device)
    if len(columns) == layer.output_size_per_partition:  # not gathered
        columns += len(columns) * layer.tp_group.rank()
    return logits.masked_fill(columns >= vocab_size, -torch.inf), bias


def ddp_config(args: argparse.Namespace):
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )


def build_optimizer(args: argparse.Namespace, model: Any):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta2=0.95,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=args.train_iters,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
        # A run that is continued has the ends that its command line and settings state.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler
