"""The time of a hybrid model's step through Megatron's schedule, eager and with CUDA
graphs.

GDN, attention and MLP layers on Transformer Engine's modules in bf16, with our GDN
layer and with megatron-core's, from the same weights over the same tokens. A step is
forward and backward of two micro-batches and the optimizer. ``packed`` holds eight
documents. ``local`` is Megatron's ``cuda_graph_impl="local"``: a graph per layer and
direction; with packed documents these lie in fixed buffers, which every micro-batch
fills, and layers with attention run eagerly unless ``fused_rope``. ``loss`` is that of
the step after the last one timed, so a graph that computes something else shows.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import product
from typing import Any

import torch
from lib.layers import start_megatron, thd
from lib.measure import synchronize
from lib.model import DEVICE, gdn_sizes, hybrid_model, transformer_config
from lib.session import Session, release
from torch import Tensor, nn

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
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def build(mixer: str, packed: bool, graphs: str, row: dict[str, Any]) -> nn.Module:
    from megatron.core.models.hybrid.hybrid_layer_specs import (
        hybrid_stack_spec as upstream,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_gdn.specs import hybrid_stack_spec

    hidden = row["hidden"]
    heads = max(1, hidden // 128)
    # a tracker whose states a graph can hold
    te = row["modules"] == "te"
    model_parallel_cuda_manual_seed(0, te_rng_tracker=te, force_reset_rng=True)
    config = transformer_config(
        hidden,
        DTYPE,
        num_layers=row["depth"],
        ffn_hidden_size=hidden * 11 // 4,
        num_attention_heads=heads,
        gated_linear_unit=True,
        calculate_per_token_loss=True,
        cuda_graph_impl=graphs,
        apply_rope_fusion=row["fused_rope"],
        **gdn_sizes(heads, 2 * heads, 128),
    )
    if DEVICE == "cuda":
        kernels()  # fences FlashQLA's kernels for upstream's layers too
    torch.manual_seed(5)
    spec = upstream if mixer == "upstream" else hybrid_stack_spec(row["modules"])
    pattern = (PATTERN * row["depth"])[: row["depth"]]
    model = hybrid_model(config, spec, pattern, VOCABULARY, row["tokens"]).to(DEVICE)
    if packed and graphs == "local" and not row["fused_rope"]:
        leave_attention_out_of_graphs(model)
    return model


class Trainer:
    """A model, its optimizer, and one step of them."""

    def __init__(self, model: Any, packed: bool, tokens: int) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        config = model.config
        wrapped = Float16Module(config, model) if config.bf16 else model
        of_ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.ddp = DistributedDataParallel(config, of_ddp, wrapped)
        options = OptimizerConfig(
            lr=1e-4, bf16=config.bf16, params_dtype=config.params_dtype
        )
        self.optimizer = get_megatron_optimizer(options, [self.ddp])
        config.finalize_model_grads_func = finalize_model_grads
        torch.manual_seed(9)
        shape = (MICRO_BATCHES, 1, tokens + 1)
        self.tokens = torch.randint(0, VOCABULARY, shape).to(DEVICE)
        self.position = torch.arange(tokens, device=DEVICE)[None]
        inner = [i * tokens // DOCUMENTS | 1 for i in range(1, DOCUMENTS)]
        self.offsets = [0, *inner, tokens]
        self.in_buffers = packed and config.cuda_graph_impl == "local"
        self.packed = thd(self.offsets) if packed else None
        if self.in_buffers:
            longest = self.packed.max_seqlen_q
            self.packed = static_packed_seq_params(
                tokens, DOCUMENTS, max_seqlen=longest, device=DEVICE
            )

    def step(self) -> Tensor:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

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

    def _forward(self, batches: Any, model: nn.Module) -> tuple[Tensor, Any]:
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

        def loss(per_token: Tensor) -> Any:
            total = per_token.float().sum()
            count = torch.tensor(per_token.numel(), device=DEVICE, dtype=torch.int)
            return total, count, {"loss": total.detach() / count}

        return losses, loss


def measure(trainer: Trainer, warmup: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step: on the device's clock, and of the host to issue it."""
    first = trainer.step().item()
    for _ in range(warmup):
        trainer.step()
    synchronize()
    times = []
    host = []
    for _ in range(steps):
        began = time.perf_counter()
        trainer.step()
        host.append((time.perf_counter() - began) * 1e3)
        synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return {
        "step_ms": statistics.median(times),
        "p10": sorted(times)[len(times) // 10],
        "p90": sorted(times)[-1 - len(times) // 10],
        "host_ms": statistics.median(host),
        "first_loss": first,
        "loss": trainer.step().item(),
    }


def steps(session: Session) -> None:
    """The time of a step: cases x graphs x whose layer."""
    start_megatron()
    row = session.row
    layers = session.args.layers or row["layers"]
    for each in product(session.args.cases or row["cases"], row["graphs"], layers):
        case, graphs, mixer = each
        what = " ".join(each)
        if each == ("packed", "local", "upstream"):
            session.say(f"{what}: it reads boundaries on the host")
        elif not session.late(what):
            names = {"case": case, "graphs": graphs, "mixer": mixer}
            names["layer"] = f"{graphs} {mixer}"
            run = partial(step_of, session, case, graphs, mixer)
            record = session.attempt(names, run)
            if record is not None:
                session.emit(names | record)
            release()


def step_of(session: Session, case: str, graphs: str, mixer: str) -> dict[str, Any]:
    row = session.row
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    packed = case == "packed"
    trainer = Trainer(build(mixer, packed, graphs, row), packed, row["tokens"])
    found: dict[str, Any] = dict(measure(trainer, 5, session.repeats))
    if DEVICE == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated() / 2**20
    model = {"layers": row["depth"], "tokens": row["tokens"]}
    return found | model | {"micro_batches": MICRO_BATCHES, "modules": row["modules"]}
