"""What runs on the ranks: a transformers model and the Megatron model filled from its
folder."""

import logging
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_gdn import GatedDeltaNet
from megatron_gdn.hf import (
    build_model,
    compare_folders,
    load_hf_weights,
    megatron_model,
    read_hf_config,
    save_hf_weights,
)
from megatron_gdn.hf.build import transformer_config
from megatron_gdn.hf.folders import find_checkpoint
from megatron_gdn.mixers.tensor_map import dequantised
from megatron_gdn.specs import gpt_block_spec, hybrid_stack_spec
from tests.hf.tiny_models import model_class
from tests.parallel import parallel

# Lengths around the convolution, and past the 64 tokens of a chunk of the delta rule.
TOKENS = 65


def build_megatron(config, kind, params_dtype=torch.float32, **changes):
    """A HybridModel or GPTModel of ``config`` that gives whole logits."""
    model, _ = build_model(
        config, kind, dtype=params_dtype, parallel_output=False, **changes
    )
    return model


def megatron_state(model) -> dict[str, torch.Tensor]:
    """Parameters with the layer and expert numbers of the whole model, dequantised."""
    bare = megatron_model._unwrap_model(model)
    named = megatron_model._parameters_by_global_name(bare)
    return {name: dequantised(parameter.detach()) for name, parameter in named.items()}


def logits_of(model, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """``[B, S, vocab]`` of ``tokens [B, S]``, causal."""
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, hidden)[..., :vocab]


def hf_model(folder: Path):
    """The folder's model by transformers itself, in fp32, with its own plain-torch
    mathematics."""
    load = model_class(read_hf_config(folder).architecture).from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_agree(folder: Path, kind: str, tp: int = 1, **changes) -> dict[str, float]:
    config = read_hf_config(folder)
    theirs_model = hf_model(folder)
    torch.manual_seed(5)
    # A multiple of tp, so that sequence parallelism can share it.
    tokens = torch.randint(config.vocab_size, (2, TOKENS + tp - 1))
    with parallel(tp), torch.no_grad():
        model = build_megatron(config, kind, **changes).eval()
        load_hf_weights(model, folder)
        ours = logits_of(model, tokens, config.vocab_size)
        theirs = theirs_model(tokens, use_cache=False).logits
        noise = _rounding_noise(theirs_model, tokens, theirs)
    return _compare_logits(ours, theirs, noise)


def _rounding_noise(model, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """For each token, how far one fp32 rounding of the embeddings moves transformers'
    logits."""
    embeddings = model.get_input_embeddings()(tokens)
    # About ten roundings in each of two blocks of four layers; errors add in squares.
    roundings = 80**0.5
    moved = torch.zeros(tokens.shape)
    for _ in range(8):
        sign = torch.randint_like(embeddings, 2) * 2 - 1
        rounded = model(
            inputs_embeds=embeddings * (1 + sign * 2.0**-23), use_cache=False
        ).logits
        moved = torch.maximum(moved, (rounded - logits).abs().amax(-1))
    return roundings * moved


def _compare_logits(ours, theirs, noise):
    """Largest difference beyond the noise and most common difference, over the largest
    logit."""
    scale = theirs.abs().max()
    difference = (ours - theirs).abs().amax(-1)
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
    return {
        "beyond noise": ((difference - noise).max() / scale).item(),
        "median": (difference.median() / scale).item(),
        "largest": (difference.max() / scale).item(),
        "cosine": cosine.min().item(),
    }


def load_dist_checkpoint(model, folder: Path) -> None:
    """What Megatron's ``--load`` does with a model's weights."""
    from megatron.core import dist_checkpointing

    state = {"model": model.sharded_state_dict()}
    model.load_state_dict(
        dist_checkpointing.load(state, str(find_checkpoint(folder)))["model"]
    )


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(find_checkpoint(folder))
    stored = reader.read_metadata().state_dict_metadata.items()
    tensors = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        for key, one in stored
        if hasattr(one, "size")
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _model_of_stage(config, kind: str, dtype: torch.dtype, tp: int, pp: int):
    pattern = config.hybrid_layer_pattern
    if kind == "hybrid" and pp == 2:
        middle = len(pattern) // 2
        pattern = f"{pattern[:middle]}|{pattern[middle:]}"
    pattern = {"layer_pattern": pattern} if kind == "hybrid" else {}
    return build_megatron(
        config, kind, params_dtype=dtype, sequence_parallel=tp > 1, **pattern
    )


def checkpoint_loads(folder, checkpoint, kind, tp=1, pp=1, ep=1):
    """The checkpoint and the Hugging Face folder fill this rank alike; the names it
    holds."""
    config = read_hf_config(folder)
    with parallel(
        tp, pp=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    ):
        filled = _model_of_stage(config, kind, torch.float32, tp, pp)
        load_hf_weights(filled, folder)
        loaded = _model_of_stage(config, kind, torch.float32, tp, pp)
        load_dist_checkpoint(loaded, checkpoint)
        expected = megatron_state(filled)
        held = megatron_state(loaded)
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name]), name
    return sorted(map(_canonical, held))


def load_and_save(checkpoint, folder, target, kind, dtype, **sizes):
    """A run loads a checkpoint, and saves as Megatron saves."""
    from megatron.core import dist_checkpointing

    tp, pp, ep = (sizes.get(name, 1) for name in ("tp", "pp", "ep"))
    with parallel(
        tp, pp=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    ):
        model = _model_of_stage(read_hf_config(folder), kind, dtype, tp, pp)
        load_dist_checkpoint(model, checkpoint)
        target.mkdir(exist_ok=True)
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(target))


def save_with_plain_norms(folder, target):
    """A run without ``--apply-layernorm-1p`` fills its model and saves as Megatron
    saves."""
    from argparse import Namespace

    from megatron.core import dist_checkpointing

    with parallel(1):
        model, _ = build_model(
            folder,
            dtype=torch.float32,
            layernorm_zero_centered_gamma=False,
            vocab_divisible_by=1,
        )
        load_hf_weights(model, folder)
        target.mkdir()
        run = {"args": Namespace(layernorm_zero_centered_gamma=False)}
        dist_checkpointing.save(model.sharded_state_dict() | run, str(target))


def _canonical(name: str) -> str:
    """The Transformer Engine name of a local GPT model's parameter."""
    name = re.sub(
        r"experts\.local_experts\.(\d+)\.(\w+)\.weight", r"experts.\2.weight\1", name
    )
    layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else -1
    fused = "linear_qkv" if layer % 4 == 3 else "in_proj"
    return name.replace("input_layernorm.", f"self_attention.{fused}.layer_norm_")


class OwnWrapper(torch.nn.Module):
    """Of a class that Megatron's ``unwrap_model`` does not know, as torch's DDP is."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def save_gives_the_source_back(folder, target, kind, dtype, tp=1, wrap=False):
    """Load into a model of ``dtype``, save, compare: the differences, as text."""
    from megatron.core.transformer.module import Float16Module

    config = read_hf_config(folder)
    with parallel(tp):
        model = build_megatron(config, kind, params_dtype=dtype)
        if wrap:
            model = OwnWrapper(Float16Module(model.config, model))
        load_hf_weights(model, folder)
        state = megatron_state(model)
        gates = [t for n, t in state.items() if n.endswith(("A_log", "dt_bias"))]
        assert gates
        assert {tensor.dtype for tensor in gates} == {torch.float32}
        save_hf_weights(model, target, like=folder)
        torch.distributed.barrier()
    return [str(difference) for difference in compare_folders(folder, target)]


def save_trained_gates(folder, target, tp, fp32_gates):
    """Load, move the gates of layer 0 off bf16, save; this rank's gates and its
    warnings."""
    with parallel(tp), _warnings_of("megatron_gdn.hf") as said:
        model = build_megatron(
            read_hf_config(folder), "hybrid", params_dtype=torch.bfloat16
        )
        load_hf_weights(model, folder)
        (left_out,) = [line for line in said if "not part of a Megatron" in line]
        assert left_out.startswith("2 tensors") and "the first mtp." in left_out
        layer = model.decoder.layers[0].self_attention
        gates = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
        with torch.no_grad():
            for gate in gates.values():
                gate.add_(torch.linspace(0.001, 0.002, gate.numel()))
        said.clear()
        save_hf_weights(model, target, like=folder, fp32_gates=fp32_gates)
        torch.distributed.barrier()
        return {name: gate.detach() for name, gate in gates.items()}, said


@contextmanager
def _warnings_of(name: str):
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def loading_fails(
    folder: Path, kind: str = "hybrid", config=None, options: dict | None = None
) -> str:
    import dataclasses

    published = read_hf_config(folder)
    changes = dict(config or {})
    sizes = SimpleNamespace(**vars(published.sizes) | changes.pop("sizes", {}))
    built_for = dataclasses.replace(published, sizes=sizes, **changes)
    with parallel():
        model = build_megatron(built_for, kind)
        for module in model.modules():
            if isinstance(module, GatedDeltaNet):
                vars(module).update(options or {})
        before = {
            name: tensor.clone() for name, tensor in megatron_state(model).items()
        }
        try:
            load_hf_weights(model, folder)
        except ValueError as error:
            after = megatron_state(model)
            assert all(
                torch.equal(after[name], tensor) for name, tensor in before.items()
            )
            return str(error)
    return "no error"


def mark_the_layers_of_a_spec(folder: Path, kind: str) -> set[type]:
    """The classes of the recurrent layers of a model that is built by a given spec."""

    class Marked(GatedDeltaNet):
        pass

    with parallel():
        hf = read_hf_config(folder)
        if kind == "hybrid":
            spec = hybrid_stack_spec("local")
            layer = spec.submodules.gdn_layer
        else:
            spec = gpt_block_spec(transformer_config(hf, "gpt"))
            layer = spec.layer_specs[0]
        layer.submodules.self_attention.module = Marked
        model = build_megatron(hf, kind, spec=spec)
        found = {type(m) for m in model.modules() if isinstance(m, GatedDeltaNet)}
        assert Marked in found
        return {each.__name__ for each in found}
