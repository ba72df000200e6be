"""A hybrid model through Megatron's schedule: the time of a step, eager and with CUDA
graphs, and losses under FP8.

GDN, attention and MLP layers on Transformer Engine's modules in bf16, with our GDN
layer and with megatron-core's, from the same weights over the same tokens. A step is
forward and backward of two micro-batches and the optimizer. ``packed`` holds eight
documents. ``local`` is Megatron's ``cuda_graph_impl="local"``: a graph per layer and
direction; with packed documents these lie in fixed buffers, which every micro-batch
fills, and layers with attention run eagerly unless ``fused_rope``. ``loss`` is that of
the step after the last one timed, so a graph that computes something else shows.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lib.layers import DEVICE, start_megatron, thd
from lib.session import Session, release

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


@dataclass
class Asked:
    """What the registry's row says of the model.

    Attributes:
        modules: "te" or "local".
        depth: layers of ``PATTERN``, repeated.
        graphs: "none" or "local".
        fused_rope: Transformer Engine's rotation, which graphs can capture.
        fp8_recipe: Megatron's name; "" for bf16.
        seed: of the weights.
    """

    modules: str
    depth: int
    hidden: int
    tokens: int
    graphs: str = "none"
    fused_rope: bool = False
    fp8_recipe: str = ""
    seed: int = 5


def asked_of(session: Session, **more: Any) -> Asked:
    row = session.row
    if session.args.tiny:
        row = row | row["tiny"]
    return Asked(row["modules"], row["depth"], row["hidden"], row["tokens"], **more)


def seed_of_random_states(asked: Asked) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    te = asked.modules == "te"
    model_parallel_cuda_manual_seed(0, te_rng_tracker=te, force_reset_rng=True)


def build(mixer: str, packed: bool, asked: Asked) -> torch.nn.Module:
    from megatron.core.models.hybrid.hybrid_layer_specs import (
        hybrid_stack_spec as upstream,
    )
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.specs import hybrid_stack_spec

    heads = max(1, asked.hidden // 128)
    pattern = (PATTERN * asked.depth)[: asked.depth]
    bf16 = DEVICE == "cuda"
    config = TransformerConfig(
        num_layers=asked.depth,
        hidden_size=asked.hidden,
        ffn_hidden_size=asked.hidden * 11 // 4,
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
        cuda_graph_impl=asked.graphs,
        apply_rope_fusion=asked.fused_rope,
        fp8="hybrid" if asked.fp8_recipe else None,
        fp8_recipe=asked.fp8_recipe or "delayed",
    )
    if bf16:
        kernels()  # fences FlashQLA's kernels for upstream's layers too
    torch.manual_seed(asked.seed)
    spec = upstream if mixer == "upstream" else hybrid_stack_spec(asked.modules)
    model = HybridModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=asked.tokens,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
    ).to(DEVICE)
    if packed and asked.graphs == "local" and not asked.fused_rope:
        leave_attention_out_of_graphs(model)
    return model


class Trainer:
    """A model, its optimizer, and one step of them."""

    def __init__(self, model: torch.nn.Module, packed: bool, asked: Asked) -> None:
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
            0, VOCABULARY, (MICRO_BATCHES, 1, asked.tokens + 1)
        ).to(DEVICE)
        self.position = torch.arange(asked.tokens, device=DEVICE)[None]
        inner = [i * asked.tokens // DOCUMENTS | 1 for i in range(1, DOCUMENTS)]
        self.offsets = [0, *inner, asked.tokens]
        self.in_buffers = packed and config.cuda_graph_impl == "local"
        self.packed = thd(self.offsets) if packed else None
        if self.in_buffers:
            longest = self.packed.max_seqlen_q
            self.packed = static_packed_seq_params(
                asked.tokens, DOCUMENTS, max_seqlen=longest, device=DEVICE
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


def measure(trainer: Trainer, warmup: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step: on the device's clock, and of the host to issue it."""

    def wait() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    first = trainer.step().item()
    for _ in range(warmup):
        trainer.step()
    wait()
    times = []
    host = []
    for _ in range(steps):
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


def steps(session: Session) -> None:
    """The time of a step: cases x graphs x whose layer."""
    start_megatron()
    row = session.row
    for case in session.args.cases or row["cases"]:
        for graphs in row["graphs"]:
            asked = asked_of(session, graphs=graphs, fused_rope=row["fused_rope"])
            for mixer in session.args.layers or row["layers"]:
                names = {"case": case, "graphs": graphs, "mixer": mixer}
                what = f"{case} {graphs} {mixer}"
                if (case, graphs, mixer) == ("packed", "local", "upstream"):
                    session.say(f"{what}: it reads boundaries on the host")
                elif not session.late(what):
                    run = partial(step_of, session, case, mixer, asked)
                    record = session.attempt(names, run)
                    if record is not None:
                        session.emit(names | record | {"layer": f"{graphs} {mixer}"})
                    release()


def step_of(session: Session, case: str, mixer: str, asked: Asked) -> dict[str, Any]:
    seed_of_random_states(asked)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    packed = case == "packed"
    trainer = Trainer(build(mixer, packed, asked), packed, asked)
    count = session.args.repeats or (2 if session.args.tiny else 10)
    found: dict[str, Any] = dict(measure(trainer, 5, count))
    if DEVICE == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated() / 2**20
    model = {"layers": asked.depth, "tokens": asked.tokens}
    return found | model | {"micro_batches": MICRO_BATCHES, "modules": asked.modules}


def text(tokens: int, steps: int) -> torch.Tensor:
    """``[steps, micro-batches, 1, tokens + 1]``: stretches of source, in an order of
    their own."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    stream = torch.frombuffer(
        bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8
    )
    pieces = (
        stream[: len(stream) // (tokens + 1) * (tokens + 1)]
        .view(-1, 1, tokens + 1)
        .long()
    )
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(1))
    return pieces[order[: steps * MICRO_BATCHES]].unflatten(0, (steps, MICRO_BATCHES))


class Run:
    """A model in training, with a high learning rate."""

    def __init__(self, asked: Asked) -> None:
        seed_of_random_states(asked)
        self.trainer = Trainer(build("ours", False, asked), False, asked)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = 1e-3
        self.losses: list[float] = []

    def train(self, batches: torch.Tensor) -> None:
        for batch in batches:
            self.trainer.tokens = batch.to(DEVICE)
            self.losses.append(float(self.trainer.step()))

    def checkpoint(self) -> Any:
        parts = self.trainer.ddp.state_dict(), self.trainer.optimizer.state_dict()
        return copy.deepcopy(parts)

    def load(self, checkpoint: Any) -> None:
        model, optimizer = copy.deepcopy(checkpoint)
        self.trainer.ddp.load_state_dict(model, strict=False)
        self.trainer.optimizer.load_state_dict(optimizer)


def curves(session: Session) -> None:
    """Losses under FP8 over the Python standard library's source, beside two bf16 runs
    from other weights: each run's distance from the first over the last tenth of the
    steps. Then FP8 runs go on from checkpoints of the middle, FP8's and bf16's."""
    start_megatron()
    count = session.args.repeats or session.row["steps"]
    half = count // 2
    recipes = [] if session.args.tiny else session.row["recipes"]
    batches = text(asked_of(session).tokens, count)
    kinds = {"bf16": ("", 5), "bf16, other weights": ("", 6)}
    kinds |= {recipe: (recipe, 5) for recipe in recipes}
    runs: dict[str, list[float]] = {}
    middles: dict[str, Any] = {}
    for name, (recipe, seed) in kinds.items():
        if session.late(name):
            continue
        run = Run(asked_of(session, fp8_recipe=recipe, seed=seed))
        run.train(batches[:half])
        middles[name] = run.checkpoint()
        run.train(batches[half:])
        runs[name] = run.losses
        last = max(1, count // 10)
        pairs = zip(run.losses, runs["bf16"], strict=True)
        apart = [abs(a - b) for a, b in pairs][-last:]
        means = {"first": run.losses[0], "last": run.losses[-1]}
        means |= {"from_bf16": sum(apart) / last, "largest": max(apart)}
        session.emit({"layer": name, **means, "losses": run.losses})
        del run
        release()
    first = recipes[0] if recipes else ""
    for source in (first or "bf16", "bf16"):
        if source not in middles or session.late(f"on from {source}"):
            continue
        run = Run(asked_of(session, fp8_recipe=first, seed=7))
        run.load(middles[source])
        run.train(batches[half : half + 10])
        same = zip(run.losses, runs[source][half : half + 10], strict=True)
        largest = max(abs(a - b) for a, b in same)
        session.emit({"layer": f"on from {source}", "largest": largest})
