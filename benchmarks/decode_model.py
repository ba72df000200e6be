"""A decode step of a hybrid model beside its floor and beside transformers' model, in
one run.

One model of Qwen3.5's form with random weights, by transformers (with fla's kernels
where they are installed, and its own cache) and by Megatron from the same file, in
Megatron's StaticInferenceContext: eager, and as a CUDA graph of one step, whose
attention then reads the keys of one length. The floor is the bytes of the weights
(embeddings apart), histories and states, these twice, at the bandwidth of a copy.
``error`` and ``their_error`` are distances (root mean square) of our logits and
transformers' from those of the plain rule in twice the width, over their size; ours may
be twice theirs. cuDNN's attention prepares itself again for every length of the keys,
some 10 ms on the host: ``transformers_ms`` is with it, as torch chooses, and
``transformers_without_cudnn_ms`` without; ``--set attention=unfused`` leaves it out of
our model.

First one layer: a decode step on a dynamic context's buffers, half of whose slots are
taken in another order, beside ``MambaMixer`` of Megatron with states of the same size
where that runs.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from decode import copy_rate, milliseconds
from lib.calls import furthest
from lib.measure import captured
from lib.session import Session

ON_GPU = torch.cuda.is_available()
ERRORS = "error", "graph_error"
PLACE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
PROMPT = 64
COMPARED = 4
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 5632,
    "vocab_size": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
TINY = SIZES | {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def their_model(sizes: dict[str, Any]) -> torch.nn.Module:
    if not ON_GPU:  # transformers picks these kernels at import, and no CPU runs them
        hidden: Any = dict.fromkeys(("fla", "causal_conv1d"))
        sys.modules.update(hidden)
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(1)
    config = Qwen3_5TextConfig(**sizes, tie_word_embeddings=False)
    model: Any = Qwen3_5ForCausalLM(config)
    return model.to(PLACE, DTYPE).eval()


def our_model(
    folder: str, modules: str, tokens: int, attention: str = "auto"
) -> torch.nn.Module:
    from megatron.core.transformer.enums import AttnBackend

    from megatron_gdn.hf import build_model, load_hf_weights

    model, _ = build_model(
        folder,
        modules=modules,
        dtype=DTYPE,
        parallel_output=False,
        max_sequence_length=tokens,
        attention_backend=AttnBackend[attention],
        bias_activation_fusion=True,
        apply_rope_fusion=modules != "local",
    )
    load_hf_weights(model, folder)
    return model.to(PLACE).eval()


def difference(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Of logits ``[B, 1, vocabulary]``; Megatron's may have padding at the end."""
    gap = logits[..., : exact.shape[-1]].to(exact.dtype) - exact
    return (gap.norm() / exact.norm()).item()


@torch.inference_mode()
def exact_steps(
    folder: str, texts: list[torch.Tensor], attention: str
) -> list[list[torch.Tensor]]:
    """Of every text the logits of the first steps after the prompt, in twice the
    width."""
    from megatron.core.transformer.enums import AttnBackend

    from megatron_gdn.hf import build_model, load_hf_weights

    model, _ = build_model(
        folder,
        modules="local",
        dtype=torch.float32 if ON_GPU else torch.float64,
        parallel_output=False,
        layer_options={"backend": "reference"},
        attention_backend=AttnBackend[attention],
    )
    load_hf_weights(model, folder)
    model.to(PLACE).eval()
    found = []
    for text in texts:
        places = torch.arange(text.shape[1], device=PLACE).expand_as(text)
        found.append(
            list(model(text, places, None)[:, PROMPT:].clone().split(1, dim=1))
        )
    return found


@torch.inference_mode()
def their_steps(
    model: Any, text: torch.Tensor, repeats: int
) -> tuple[list[torch.Tensor], list[float]]:
    """Logits of the first steps after the prompt; a step's milliseconds with cuDNN and
    without."""
    out = model(text[:, :PROMPT], use_cache=True)
    found = []
    # transformers 5.24, and before
    name = "cache" if "cache" in out else "past_key_values"
    cache = out[name]

    def step(token: torch.Tensor) -> torch.Tensor:
        return model(token, use_cache=True, **{name: cache}).logits

    for n in range(COMPARED):
        found.append(step(text[:, PROMPT + n : PROMPT + n + 1]))
    took = []
    for with_cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        took.append(milliseconds(lambda: step(text[:, :1]), repeats, ON_GPU))
    torch.backends.cuda.enable_cudnn_sdp(True)
    return found, took


@torch.inference_mode()
def our_steps(
    model: Any, text: torch.Tensor, exact: list, repeats: int
) -> dict[str, Any]:
    from megatron.core.inference.utils import InferenceMode

    from megatron_gdn.inference.generate import next_logits, static_context

    line: dict[str, Any] = {}
    context = static_context(model, len(text), PROMPT + 2 * repeats + 32)
    with InferenceMode.active():

        def step(token: torch.Tensor) -> torch.Tensor:
            return next_logits(model, token, context)

        next_logits(model, text[:, :PROMPT], context)
        errors = {
            n: difference(step(text[:, PROMPT + n : PROMPT + n + 1]), logits)
            for n, logits in enumerate(exact)
        }
        line["error"] = furthest(errors)
        memory = [x for pair in context.key_value_memory_dict.values() for x in pair]
        # of attention the first dimension is longer
        recurrent = [x for x in memory if len(x) == 1]
        line["state_bytes"] = sum(x.numel() * x.element_size() for x in recurrent)
        token = text[:, :1].clone()
        line["eager_ms"] = milliseconds(lambda: step(token), repeats, ON_GPU)
        if not ON_GPU:
            return line
        try:
            graph, logits = captured(lambda: step(token))
        except Exception as error:  # the figures of the other steps are worth having
            torch.cuda.synchronize()
            return line | {"graph_failed": f"{type(error).__name__}: {error}"[:300]}
        before = [x.clone() for x in memory]
        graph.replay()
        replayed = logits.clone()
        for x, kept in zip(memory, before, strict=True):
            x.copy_(kept)  # a replay goes on from here to the same bits
        graph.replay()
        line["graph_repeats"] = torch.equal(replayed, logits)
        line["graph_finite"] = bool(logits.isfinite().all())
        line["graph_ms"] = milliseconds(graph.replay, repeats, ON_GPU)
    return line


@torch.inference_mode()
def graph_error(model: Any, text: torch.Tensor) -> float:
    """Eager logits of a step against those of a graph of the same step, from the same
    memory."""
    from megatron.core.inference.utils import InferenceMode

    from megatron_gdn.inference.generate import next_logits, static_context

    found = []
    with InferenceMode.active():
        for replays in (False, True):
            context = static_context(model, len(text), PROMPT + 8)
            next_logits(model, text[:, :PROMPT], context)
            for n in range(3):
                next_logits(model, text[:, PROMPT + n : PROMPT + n + 1], context)
            token = text[:, PROMPT + 3 : PROMPT + 4].clone()
            if replays:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    logits = next_logits(model, token, context)
                graph.replay()
            else:
                logits = next_logits(model, token, context)
            found.append(logits.clone())
    return difference(found[1], found[0])


@torch.inference_mode()
def layer_steps(mixer: Any, decode: Any, N: int, repeats: int) -> float:
    """Milliseconds of a mixer's decode on buffers of a dynamic context, between its
    projections."""
    conv, states = mixer.mamba_state_shapes_per_request()
    conv = torch.zeros(2 * N, *conv, dtype=DTYPE, device=PLACE)
    states = torch.zeros(2 * N, *states, dtype=torch.float32, device=PLACE)
    slots = torch.randperm(2 * N)[:N].to(PLACE, torch.int32)
    hidden = torch.randn(N, 1, mixer.config.hidden_size, dtype=DTYPE, device=PLACE)
    rows, _ = mixer.in_proj(hidden)

    def step() -> torch.Tensor:
        return decode(rows, conv, states, slots)

    if not ON_GPU:
        return milliseconds(step, repeats, False)
    graph, _ = captured(step)
    return milliseconds(graph.replay, repeats, True)


def layers(
    session: Session,
    sizes: dict[str, Any],
    batches: list[int],
    repeats: int,
    rate: float,
) -> None:
    """Our Gated DeltaNet and Megatron's Mamba mixer with states of one size."""
    from megatron.core.models.hybrid.hybrid_layer_specs import (
        hybrid_stack_spec as upstream,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.specs import gated_delta_net_spec

    linear = {name: size for name, size in sizes.items() if name.startswith("linear_")}
    H, K, V = (
        sizes[f"linear_{x}"]
        for x in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=sizes["hidden_size"],
        num_attention_heads=4,
        params_dtype=DTYPE,
        bf16=ON_GPU,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        mamba_state_dim=K,
        mamba_head_dim=V // 2,
        mamba_num_heads=2 * H,
        mamba_num_groups=8 if H >= 8 else 2,
        **linear,
    )
    made: dict[str, Any] = {}
    try:
        ours = (
            build_module(gated_delta_net_spec("local"), config, layer_number=1)
            .to(PLACE)
            .eval()
        )
        made["gdn"] = ours, ours.ssm_decode
        stack: Any = upstream
        spec = stack.submodules.mamba_layer.submodules.mixer
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        theirs = build_module(
            spec,
            config,
            d_model=config.hidden_size,
            layer_number=1,
            pg_collection=groups,
        )
        theirs = theirs.to(PLACE).eval()
        made["megatron's mamba"] = (
            theirs,
            getattr(theirs, "ssm_decode", theirs._ssm_decode),
        )
    except Exception as error:
        print(f"not all layers run here: {type(error).__name__}: {error}"[:300])
    for name, (mixer, decode) in made.items():
        for N in batches:
            floor = 2 * N * H * K * V * 4 / rate
            took = layer_steps(mixer, decode, N, repeats)
            record = {"case": f"{N} rows, dynamic", "layer": name, "batch": N}
            record |= {"step_ms": took, "states_floor_ms": floor}
            session.emit(record | {"over_floor": took / floor})


def steps(session: Session) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_gdn.compat.one_process import end_one_process, start_one_process

    tiny = session.args.tiny
    sizes = TINY if tiny else SIZES
    batches = [1, 3] if tiny else session.row["batches"]
    modules = "local" if tiny else session.row["modules"]
    attention = session.row["attention"]
    repeats = session.repeats
    start_one_process()
    # Megatron's own tracker for inference: dropout's random states are left alone, so
    # that a graph can hold local attention.
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    rate = copy_rate(ON_GPU, 10)
    layers(session, sizes, batches, repeats, rate)
    theirs: Any = their_model(sizes)
    texts = [
        torch.randint(sizes["vocab_size"], (batch, PROMPT + COMPARED), device=PLACE)
        for batch in batches
    ]
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = our_model(folder, modules, PROMPT + 2 * repeats + 32, attention)
        exact_of = exact_steps(folder, texts, attention)
    parameters = dict(ours.named_parameters())
    weights = sum(
        p.numel() * p.element_size()
        for name, p in parameters.items()
        if "embedding" not in name
    )
    wrong = []
    for text, exact in zip(texts, exact_of, strict=True):
        if session.late(f"{len(text)} rows"):
            break
        logits, (their_ms, without_cudnn) = their_steps(theirs, text, repeats)
        line = our_steps(ours, text, exact, repeats)
        pairs = enumerate(zip(logits, exact, strict=False))
        line["their_error"] = furthest({n: difference(*pair) for n, pair in pairs})
        if ON_GPU and "graph_ms" in line:
            line["graph_error"] = graph_error(ours, text)
        line |= {
            "floor_ms": (weights + 2 * line["state_bytes"]) / rate,
            "transformers_ms": their_ms,
            "transformers_without_cudnn_ms": without_cudnn,
        }
        names = {"case": f"{len(text)} rows", "layer": "model", "batch": len(text)}
        session.emit(names | line | {"modules": modules, "attention": attention})
        # NaN is not within any bound
        bound = 2 * line["their_error"]
        if not all(line.get(name, 0) <= bound for name in ERRORS):
            wrong.append(line)
    end_one_process()
    if wrong:
        raise SystemExit(
            f"logits are further from exact ones than twice transformers': {wrong}"
        )
