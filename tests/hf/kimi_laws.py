"""What runs on the ranks for Kimi Linear: one step of training against transformers'
own."""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch.overrides import TorchFunctionMode

from megatron_gdn.context_parallel.layouts import SequenceLayout, positions
from megatron_gdn.hf import build_model, load_hf_weights, read_hf_config
from megatron_gdn.hf.megatron_model import (
    _local_shard,
    _parameters_by_global_name,
)
from megatron_gdn.hf.safetensors_files import SafetensorsFolder
from megatron_gdn.hf.tensor_plan import plan_tensors
from megatron_gdn.mixers.latent_attention import LatentAttention
from megatron_gdn.specs import hybrid_stack_spec
from tests.hf.model_laws import hf_model
from tests.parallel import in_ddp, parallel, run_schedule

# Past the 64 tokens of a chunk of the delta rule; each a multiple of 2 cp.
LENGTHS = (68, 8, 20)


def documents(vocabulary: int) -> list[torch.Tensor]:
    """Tokens of the documents, each with one token more, for the labels."""
    torch.manual_seed(11)
    return [torch.randint(vocabulary, (length + 1,)) for length in LENGTHS]


class Float64(TorchFunctionMode):
    """What code casts to fp32, it casts to fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def step_of_transformers(
    folder: Path, target: Path, packed: bool, exact: bool
) -> torch.Tensor:
    """Save the gradients of the mean loss under the keys of files; return the logits
    ``[tokens, vocabulary]``. ``exact``: in fp64.

    Not packed, the documents are one.
    """
    model = hf_model(folder)
    model.set_experts_implementation("eager")  # grouped products have no fp64
    with Float64() if exact else nullcontext():
        return _step_of_transformers(model.double() if exact else model, target, packed)


def _step_of_transformers(model, target: Path, packed: bool) -> torch.Tensor:
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    streams = documents(model.config.vocab_size)
    if not packed:
        streams = [torch.cat([*(tokens[:-1] for tokens in streams), streams[-1][-1:]])]
    logits = [model(tokens[None, :-1], use_cache=False).logits[0] for tokens in streams]
    labels = torch.cat([tokens[1:] for tokens in streams])
    F.cross_entropy(torch.cat(logits), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.save_pretrained(target)
    return torch.cat(logits).detach()


def step_of_megatron(
    folder: Path,
    theirs: tuple[Path, torch.Tensor],
    exact: tuple[Path, torch.Tensor],
    packed: bool,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = True,
    layout: str = "zigzag",
) -> dict[str, float]:
    """How far the logits and each gradient of this rank are from transformers', beyond
    the error that transformers' own are measured to have, relative to the norm.

    ``theirs``, ``exact``: folder of gradients and logits of transformers in fp32, fp64.
    """
    config = read_hf_config(folder)
    pattern = config.hybrid_layer_pattern
    middle = len(pattern) // 2
    stages = f"{pattern[:middle]}|{pattern[middle:]}" if pp == 2 else pattern
    experts = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp}
    with parallel(tp, cp, pp, **experts):
        model, settings = build_model(
            config,
            dtype=torch.float32,
            layer_pattern=stages,
            sequence_parallel=tp > 1 and sequence_parallel,
            calculate_per_token_loss=True,
            layer_options={"cp_layout": layout},
        )
        load_hf_weights(model, folder)
        settings.finalize_model_grads_func = finalize_model_grads
        made, held = _run_step(in_ddp(model), config.vocab_size, packed, cp, layout)
        beyond = {}
        if made is not None:
            ours = made[0, :, : config.vocab_size]
            beyond["logits"] = _beyond(ours, theirs[1][held], exact[1][held])
        files = SafetensorsFolder(theirs[0])
        files_of_exact = SafetensorsFolder(exact[0])
        parameters = _parameters_by_global_name(model)
        for entry in plan_tensors(config, files.specs, "hybrid", False).maps:
            keys = [(source.key, source.expert) for source in entry.sources]
            for name in entry.names:
                if not hasattr(parameters.get(name), "main_grad"):
                    continue
                shards = (
                    _local_shard(
                        entry, [one.read(*key) for key in keys], parameters[name]
                    )
                    for one in (files, files_of_exact)
                )
                beyond[name] = _beyond(parameters[name].main_grad, *shards)
    return beyond


def _beyond(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> float:
    size = exact.norm().item()
    ours_from_theirs = (ours.double() - theirs.double()).norm().item()
    theirs_from_exact = (theirs.double() - exact).norm().item()
    # an expert without tokens has gradients of 0
    return max(ours_from_theirs - theirs_from_exact, 0.0) / (size or 1.0)


def _run_step(ddp, vocabulary: int, packed: bool, cp: int, layout: str):
    """The logits of this rank's tokens, or None, and these tokens; the gradients are in
    ``main_grad``."""
    streams = documents(vocabulary)
    tokens = torch.cat([stream[:-1] for stream in streams])
    if packed:
        labels = torch.cat([stream[1:] for stream in streams])
        lengths = LENGTHS
    else:
        labels = torch.cat([tokens[1:], streams[-1][-1:]])
        lengths = (len(tokens),)
    rank = parallel_state.get_context_parallel_rank()
    held = positions(lengths, cp, SequenceLayout(layout))[rank]
    kept = []

    def forward_step(batches, model):
        next(batches)
        mask = None
        if not packed and cp == 1:
            mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
            mask = mask[None, None]
        logits = model(
            tokens[None, held],
            held[None],
            mask,
            packed_seq_params=_packed() if packed else None,
        )

        def loss(logits_bsv):
            whole = gather_from_tensor_model_parallel_region(logits_bsv)
            kept.append(whole.detach())
            total = F.cross_entropy(
                whole[0, :, :vocabulary], labels[held], reduction="sum"
            )
            count = torch.tensor(len(held), dtype=torch.int)
            return total, count, {"loss": total.detach()}

        return logits, loss

    run_schedule(ddp, [None], forward_step, len(tokens))
    dist.barrier()
    return (kept[0] if kept else None), held


def _packed() -> PackedSeqParams:
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )


def loading_fails(folder: Path) -> list[str]:
    """What `load_hf_weights` says of norms with the config's epsilon, and of Megatron's
    own latent attention."""
    config = read_hf_config(folder)
    spec = hybrid_stack_spec("local", kda=config.kda_options, mla={})
    said = []
    with parallel():
        model, _ = build_model(config, dtype=torch.float32, spec=spec)
        latent = next(
            one for one in model.modules() if isinstance(one, LatentAttention)
        )
        for kind in (LatentAttention, MLASelfAttention):
            latent.__class__ = kind
            try:
                load_hf_weights(model, folder)
            except ValueError as error:
                said.append(str(error))
    return said


def generation_fails(folder: Path) -> tuple[str, str]:
    """What latent attention says of cached latents, and of generation by two
    context-parallel ranks."""
    said = []
    with parallel(cp=2):
        config = read_hf_config(folder)
        try:
            build_model(config, dtype=torch.float32, cache_mla_latents=True)
        except NotImplementedError as error:
            said.append(str(error))
        model, _ = build_model(config, dtype=torch.float32)
        latent = next(
            one for one in model.modules() if isinstance(one, LatentAttention)
        )
        try:
            latent(torch.zeros(4, 1, 24), None, inference_context=object())
        except NotImplementedError as error:
            said.append(str(error))
    cached, divided = said
    return cached, divided
