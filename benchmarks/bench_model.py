"""A hybrid model through Megatron's schedule: the time of a step, eager and with CUDA
graphs.

    python3 benchmarks/bench_model.py --out results.jsonl
    python3 benchmarks/bench_model.py --modules local --layers 4 --hidden 64 --tokens 64  # CPU

GDN, attention and MLP layers on Transformer Engine's modules in bf16, with our GDN
layer and with megatron-core's, from the same weights over the same tokens. A step is
forward and backward of two micro-batches and the optimizer. ``packed`` holds eight
documents. ``local`` is Megatron's ``cuda_graph_impl="local"``: a graph per layer and
direction; with packed documents these lie in fixed buffers, which every micro-batch
fills, and layers with attention run eagerly unless ``--fused-rope``. ``loss`` is that
of the step after the last one timed, so a graph that computes something else shows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from typing import Any

import torch
from lib.layers import DEVICE, start_megatron, thd
from lib.measure import environment, table, write_lines

from megatron_gdn import (
    leave_attention_out_of_graphs,
    set_documents,
    static_packed_seq_params,
)
from megatron_gdn.gdn.flash_qla.plan import kernels

VOCABULARY = 32768
MICRO_BATCHES = 2
PATTERN = "G-G-G-*-"
DOCUMENTS = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", choices=("te", "local"), default="te")
    parser.add_argument(
        "--mixers",
        nargs="+",
        choices=("upstream", "ours"),
        default=["upstream", "ours"],
    )
    parser.add_argument(
        "--graphs", nargs="+", choices=("none", "local"), default=["none"]
    )
    parser.add_argument(
        "--cases", nargs="+", choices=("batch", "packed"), default=["batch"]
    )
    parser.add_argument(
        "--buffers",
        action="store_true",
        help="packed documents in fixed buffers without graphs too",
    )
    parser.add_argument(
        "--fused-rope",
        action="store_true",
        help="Transformer Engine's rotation, which graphs can capture",
    )
    parser.add_argument("--layers", type=int, default=16, help=f"repeats {PATTERN}")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--steps", type=int, default=10, help="timed, after as many as graphs need"
    )
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--fp8-recipe", choices=("delayed", "tensorwise", "blockwise"))
    parser.add_argument("--seed", type=int, default=5, help="of the weights")
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def build(mixer: str, graphs: str, packed: bool, args) -> torch.nn.Module:
    from megatron.core.models.hybrid.hybrid_layer_specs import (
        hybrid_stack_spec as upstream,
    )
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.specs import hybrid_stack_spec

    heads = max(1, args.hidden // 128)
    pattern = (PATTERN * args.layers)[: args.layers]
    bf16 = DEVICE == "cuda"
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        ffn_hidden_size=args.hidden * 11 // 4,
        num_attention_heads=heads,
        linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=not bf16,
        cuda_graph_impl=graphs,
        apply_rope_fusion=args.fused_rope,
        fp8="hybrid" if args.fp8_recipe else None,
        fp8_recipe=args.fp8_recipe or "delayed",
    )
    if bf16:
        kernels()  # fences FlashQLA's kernels for upstream's layers too
    torch.manual_seed(args.seed)
    spec = upstream if mixer == "upstream" else hybrid_stack_spec(args.modules)
    model = HybridModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=args.tokens,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
    ).to(DEVICE)
    if packed and graphs == "local" and not args.fused_rope:
        leave_attention_out_of_graphs(model)
    return model


class Trainer:
    """A model, its optimizer, and one step of them."""

    def __init__(self, model: torch.nn.Module, packed: bool, args) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        config = model.config
        wrapped = Float16Module(config, model) if config.bf16 else model
        self.ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped
        )
        options = OptimizerConfig(
            lr=1e-4, bf16=config.bf16, params_dtype=config.params_dtype
        )
        self.optimizer = get_megatron_optimizer(options, [self.ddp])
        config.finalize_model_grads_func = finalize_model_grads
        torch.manual_seed(9)
        self.tokens = torch.randint(
            0, VOCABULARY, (MICRO_BATCHES, 1, args.tokens + 1)
        ).to(DEVICE)
        self.position = torch.arange(args.tokens, device=DEVICE)[None]
        inner = [i * args.tokens // DOCUMENTS | 1 for i in range(1, DOCUMENTS)]
        self.offsets = [0, *inner, args.tokens]
        self.in_buffers = packed and (args.buffers or config.cuda_graph_impl == "local")
        self.packed = thd(self.offsets) if packed else None
        if self.in_buffers:
            longest = self.packed.max_seqlen_q
            self.packed = static_packed_seq_params(
                args.tokens, DOCUMENTS, max_seqlen=longest, device=DEVICE
            )

    def step(self) -> float:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        if self.ddp.config.fp8:  # as Megatron's loop: weights are quantised again
            for module in self.ddp.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(self.tokens),
            model=[self.ddp],
            num_microbatches=MICRO_BATCHES,
            seq_length=self.tokens.shape[-1] - 1,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        return torch.stack([report["loss"] for report in reports]).mean()

    def _forward(self, batches, model) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        if self.in_buffers:
            set_documents(self.packed, self.offsets)
        losses = model(
            batch[:, :-1],
            self.position,
            None,
            labels=batch[:, 1:],
            packed_seq_params=self.packed,
        )

        def loss(per_token: torch.Tensor):
            total = per_token.float().sum()
            count = torch.tensor(per_token.numel(), device=DEVICE, dtype=torch.int)
            return total, count, {"loss": total.detach() / count}

        return losses, loss


def measure(trainer: Trainer, args) -> dict[str, float]:
    """Milliseconds of a step: on the device's clock, and of the host to issue it."""

    def wait() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    first = trainer.step().item()
    for _ in range(args.warmup):
        trainer.step()
    wait()
    times = []
    host = []
    for _ in range(args.steps):
        began = time.perf_counter()
        trainer.step()
        host.append((time.perf_counter() - began) * 1e3)
        wait()
        times.append((time.perf_counter() - began) * 1e3)
    return {
        "step_ms": statistics.median(times),
        "p10": sorted(times)[len(times) // 10],
        "p90": sorted(times)[-1 - len(times) // 10],
        "host_ms": statistics.median(host),
        "first_loss": first,
        "loss": trainer.step().item(),
    }


def main() -> None:
    args = arguments()
    start_megatron()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    setting = {
        "environment": environment() if DEVICE == "cuda" else {},
        "layers": args.layers,
        "hidden": args.hidden,
        "tokens": args.tokens,
        "micro_batches": MICRO_BATCHES,
        "fused_rope": args.fused_rope,
        "fp8": args.fp8_recipe,
    }
    rows = [
        ["case", "graphs", "mixer", "step ms", "ratio", "host ms", "peak MiB", "loss"]
    ]
    for case in args.cases:
        base = None
        for graphs in args.graphs:
            for mixer in args.mixers:
                if (case, graphs, mixer) == ("packed", "local", "upstream"):
                    print(
                        f"{case} {graphs} {mixer}: it reads boundaries on the host",
                        flush=True,
                    )
                    continue
                model_parallel_cuda_manual_seed(
                    0, te_rng_tracker=args.modules == "te", force_reset_rng=True
                )
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                try:
                    packed = case == "packed"
                    trainer = Trainer(build(mixer, graphs, packed, args), packed, args)
                    found = measure(trainer, args)
                except (
                    Exception
                ) as error:  # the other combinations are worth their time
                    print(
                        f"{case} {graphs} {mixer}: {type(error).__name__}: {error}",
                        flush=True,
                    )
                    traceback.print_exc()
                    trainer = None
                    continue
                base = base or found["step_ms"]
                peak = (
                    torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else 0
                )
                record = {
                    "case": case,
                    "graphs": graphs,
                    "mixer": mixer,
                    **found,
                    "peak": peak,
                }
                write_lines(args.out, [{**record, **setting}])
                rows.append(
                    [
                        case,
                        graphs,
                        mixer,
                        f"{found['step_ms']:.2f}",
                        f"{found['step_ms'] / base:.3f}",
                        f"{found['host_ms']:.2f}",
                        f"{peak:.0f}",
                        f"{found['loss']:.4f}",
                    ]
                )
                print("  ".join(rows[-1]), flush=True)
                del trainer
                gc.collect()
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()
    print(
        f"\n{args.layers} layers, {args.tokens} tokens; ratios to the first of a case"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
