"""A decode step of a hybrid model beside its floor and beside transformers' model, in
one run.

One model of Qwen3.5's form with random weights, by transformers (with fla's kernels
where they are installed, and its own cache) and by Megatron from the same file, in
Megatron's StaticInferenceContext: eager, and as a CUDA graph of one step, whose
attention then reads the keys of one length. The floor is the bytes of the weights
(embeddings apart), histories and states, these twice, at the bandwidth of a copy.
``from_transformers`` and ``graph_error`` are distances (root mean square) of our eager
logits from transformers' and of a graph's from our eager ones. cuDNN's attention
prepares itself again for every length of the keys, some 10 ms on the host:
``transformers_ms`` is with it, as torch chooses, and ``transformers_without_cudnn_ms``
without.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from typing import Any

import torch
from lib.calls import distances, furthest
from lib.measure import latency_ms
from lib.model import DEVICE, gdn_sizes
from lib.session import Session
from torch import Tensor, nn

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
PROMPT = 64
COMPARED = 4


def token_at(text: Tensor, n: int) -> Tensor:
    """The n-th token after the prompt."""
    return text[:, PROMPT + n : PROMPT + n + 1]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of the logits ``[B, 1, vocabulary]`` of some steps, the largest; Megatron's may
    have padding at the end."""
    of_step = {}
    for n, right in enumerate(expected):
        logits = found[n][..., : right.shape[-1]]
        of_step |= distances({f"{n}": logits}, {f"{n}": right})
    return furthest(of_step)


def their_model(row: dict[str, Any]) -> Any:
    if DEVICE == "cpu":  # transformers picks these kernels at import; none runs there
        hidden: Any = dict.fromkeys(("fla", "causal_conv1d"))
        sys.modules.update(hidden)
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(1)
    key_heads, value_heads = row["heads"]
    config = Qwen3_5TextConfig(
        hidden_size=row["hidden"],
        num_hidden_layers=row["depth"],
        intermediate_size=row["hidden"] * 11 // 4,
        vocab_size=row["vocabulary"],
        num_attention_heads=key_heads,
        num_key_value_heads=max(1, key_heads // 8),
        head_dim=row["head_dim"],
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=False,
        **gdn_sizes(key_heads, value_heads, row["head_dim"]),
    )
    model: Any = Qwen3_5ForCausalLM(config)
    return model.to(DEVICE, DTYPE).eval()


def our_model(theirs: Any, modules: str, tokens: int) -> nn.Module:
    from megatron_gdn.hf import build_model, load_hf_weights

    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model, _ = build_model(
            folder,
            modules=modules,
            dtype=DTYPE,
            parallel_output=False,
            max_sequence_length=tokens,
            bias_activation_fusion=True,
            apply_rope_fusion=modules != "local",
        )
        load_hf_weights(model, folder)
    return model.to(DEVICE).eval()


@torch.inference_mode()
def their_steps(
    model: Any, text: Tensor, repeats: int
) -> tuple[list[Tensor], dict[str, Any]]:
    """Logits of the first steps after the prompt, and the times of a step."""
    out = model(text[:, :PROMPT], use_cache=True)
    # transformers 5.24, and before
    name = "cache" if "cache" in out else "past_key_values"
    cache = out[name]

    def step(token: Tensor) -> Tensor:
        return model(token, use_cache=True, **{name: cache}).logits

    logits = [step(token_at(text, n)) for n in range(COMPARED)]
    line = {}
    with_cudnn = "transformers_ms"
    for key in (with_cudnn, "transformers_without_cudnn_ms"):
        torch.backends.cuda.enable_cudnn_sdp(key == with_cudnn)
        line[key] = latency_ms(lambda: step(text[:, :1]), repeats)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return logits, line


@torch.inference_mode()
def our_steps(
    model: Any, text: Tensor, expected: list[Tensor], repeats: int
) -> dict[str, Any]:
    from megatron.core.inference.utils import InferenceMode

    from megatron_gdn.inference.generate import next_logits, static_context

    def steps(count: int) -> tuple[Any, list[Tensor]]:
        """A context, and the logits of so many steps after the prompt."""
        context = static_context(model, len(text), PROMPT + 2 * repeats + 32)
        next_logits(model, text[:, :PROMPT], context)
        return context, [
            next_logits(model, token_at(text, n), context) for n in range(count)
        ]

    with InferenceMode.active():
        context, logits = steps(COMPARED)
        line: dict[str, Any] = {"from_transformers": distance(logits, expected)}
        memory = [x for pair in context.key_value_memory_dict.values() for x in pair]
        # of attention the first dimension is longer
        recurrent = [x for x in memory if len(x) == 1]
        line["state_bytes"] = sum(x.numel() * x.element_size() for x in recurrent)
        token = text[:, :1].clone()
        line["eager_ms"] = latency_ms(
            lambda: next_logits(model, token, context), repeats
        )
        if DEVICE == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                context, _ = steps(COMPARED - 1)
            torch.cuda.synchronize()
            token = token_at(text, COMPARED - 1).clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, stream=stream, capture_error_mode="thread_local"
            ):
                of_graph = next_logits(model, token, context)
            graph.replay()
            line["graph_error"] = distance([of_graph], logits[-1:])
            line["graph_ms"] = latency_ms(graph.replay, repeats)
    return line


def steps(session: Session) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_gdn.compat.one_process import end_one_process, start_one_process

    row = session.row
    repeats = session.repeats
    start_one_process()
    # Megatron's own tracker for inference: dropout's random states are left alone, so
    # that a graph can hold local attention.
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    theirs = their_model(row)
    ours = our_model(theirs, row["modules"], PROMPT + 2 * repeats + 32)
    weights = sum(
        p.numel() * p.element_size()
        for name, p in ours.named_parameters()
        if "embedding" not in name
    )

    def measured(batch: int) -> dict[str, Any]:
        shape = (batch, PROMPT + COMPARED)
        text = torch.randint(row["vocabulary"], shape, device=DEVICE)
        logits, line = their_steps(theirs, text, repeats)
        line |= our_steps(ours, text, logits, repeats)
        moved = weights + 2 * line["state_bytes"]
        return line | {"floor_ms": 1e3 * moved / session.bandwidth}

    for batch in row["batches"]:
        names = {"case": f"{batch} rows", "layer": "model", "batch": batch}
        if session.late(names["case"]):
            break
        line = session.attempt(names, partial(measured, batch))
        if line is not None:
            session.emit(names | line | {"modules": row["modules"]})
    end_one_process()
