"""Tiny models as transformers saves them, and what every framework is asked about
them."""

from collections.abc import Iterator

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

TOKENS = 24
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
WITHOUT_GPU = {
    "moe_permute_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
}
MARKS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62}
MODELS = {
    "Qwen3-Next": ("Qwen3Next", EXPERTS),
    "Qwen3.5": ("Qwen3_5", {}),
    "Qwen3.5 MoE": ("Qwen3_5Moe", EXPERTS),
}


def published(name, folder, dtype=torch.float32, *, vision=True, **changes):
    """A tiny model of transformers' class in ``dtype``; ``changes`` are of the text
    model."""
    family, more = MODELS[name]
    text = {**SIZES, **more, **changes}
    torch.manual_seed(0)
    if family == "Qwen3Next" or not vision:
        kind = family if family == "Qwen3Next" else f"{family}Text"
        config = getattr(transformers, f"{kind}Config")(
            **text, tie_word_embeddings=False
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    else:
        config = getattr(transformers, f"{family}Config")(
            text_config=text, vision_config=VISION, tie_word_embeddings=False, **MARKS
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # norms and gates, which all begin as zeros or ones
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.eval().to(dtype)
    # Published files have Qwen3-Next's experts one by one, and Qwen3.5's in one tensor.
    model.save_pretrained(folder, save_original_format=family == "Qwen3Next")
    return model


def tokens() -> Tensor:
    """No marks of images."""
    return torch.randint(50, (2, TOKENS), generator=torch.manual_seed(1))


def require_logits(
    name: str, found: Tensor, expected: Tensor, roundings: int = 16
) -> None:
    """``roundings`` on the way to a logit, each of at most the largest number's last
    place."""
    difference = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    print(f"{name}: logits differ by {difference:.1e} of {largest:.1e}")
    assert difference <= roundings * torch.finfo(torch.float32).eps * largest


def require_exported(exported, folder, *, gates_in_fp32=False, one_by_one=False):
    """Every tensor of the folder, bit for bit and in its dtype, and no other."""
    saved = load_file(folder / "model.safetensors")
    if one_by_one:
        saved = dict(_experts_one_by_one(saved))
    for name, weight in exported:
        expected = saved.pop(name)
        gate = gates_in_fp32 and name.endswith(("A_log", "dt_bias"))
        assert weight.dtype == (torch.float32 if gate else expected.dtype), name
        assert torch.equal(weight.to(expected.dtype), expected), name
    assert not saved, sorted(saved)


def _experts_one_by_one(saved: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in saved.items():
        root, packed, kind = name.partition(".experts.")
        if not packed or kind not in ("gate_up_proj", "down_proj"):
            yield name, weight
            continue
        for i, expert in enumerate(weight):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if len(parts) == 2 else (kind,)
            for part, tensor in zip(names, parts, strict=True):
                yield f"{root}.experts.{i}.{part}.weight", tensor


def require_falling(loss_of, parameters, rate=0.1):
    optimizer = torch.optim.SGD(parameters, rate)
    losses = []
    for _ in range(3):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
