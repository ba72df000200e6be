"""Tiny models of every family, built by transformers and saved as published folders
look."""

import inspect
import json
import sys
from pathlib import Path

import torch

BF16 = torch.bfloat16
F32 = torch.float32

# K != V, three heads of attention for each group, 67 vocabulary rows: nothing divides
# by chance.
COMMON = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "max_position_embeddings": 64,
}
MOE = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
NO_PADDING = {"pad_token_id": None, "eos_token_id": None}
QWEN4 = {
    "output_gate_type": "sigmoid",
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
# Kimi Delta Attention: four heads of 8, and latent attention in the last of four
# layers.
KDA = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "max_position_embeddings": 64,
    **NO_PADDING,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
# Of moonshotai/Kimi-Linear-48B-A3B-Instruct, beside the fields of transformers' class.
KIMI_PUBLISHED = {
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "head_dim": 72,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_grouped_topk": True,
}
DENSE = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
BAILING = {"head_dim": 8, "num_experts": 4}
GLM = {
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
    "qk_rope_head_dim": 0,
    "n_routed_experts": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "index_kpool": 2,
}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": 4,
}
VISION = GLM_VISION | {"num_position_embeddings": 16}


def model_class(family: str):
    """In plain torch: where fla is installed, transformers picks its kernels at
    import."""
    import transformers

    hidden = {name: sys.modules.get(name) for name in ("fla", "causal_conv1d")}
    sys.modules.update(dict.fromkeys(hidden))
    found = getattr(transformers, family)
    for name, module in hidden.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    return found


def cache_name(model) -> str:
    """The keyword by which transformers' ``model`` takes and returns its cache."""
    taken = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in taken else "past_key_values"


def build(family: str, **changes):
    import transformers as hf

    dense = COMMON | {"intermediate_size": 20} | changes
    moe = COMMON | MOE | changes
    torch.manual_seed(sum(map(ord, family)))
    kind, settings = {
        "Qwen3NextForCausalLM": ("Qwen3Next", dense | moe),
        "Qwen3_5ForCausalLM": ("Qwen3_5Text", dense),
        "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeText", moe),
        "Qwen3_5ForConditionalGeneration": ("Qwen3_5", dense),
        "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5Moe", moe),
        "OlmoHybridForCausalLM": ("OlmoHybrid", dense | NO_PADDING),
        "Qwen4ExpForCausalLM": ("Qwen4ExpText", COMMON | MOE | QWEN4 | changes),
        "KimiLinearForCausalLM": (
            "KimiLinear",
            KDA | LATENT | {"num_local_experts": 4} | changes,
        ),
        "BailingHybridForCausalLM": ("BailingHybrid", KDA | LATENT | BAILING | changes),
        "Glm5NextForConditionalGeneration": ("Glm5Next", KDA | LATENT | GLM | changes),
    }[family]
    if family.endswith("ConditionalGeneration"):
        vision = GLM_VISION if kind == "Glm5Next" else VISION
        settings = {"text_config": settings, "vision_config": vision}
    model = model_class(family)(getattr(hf, f"{kind}Config")(**settings))
    with torch.no_grad():
        for name, param in model.named_parameters():
            # Gains on both sides of 1/2, gates unlike each other, weights as large as
            # trained ones.
            if param.dim() == 1:
                param.add_(torch.empty_like(param).uniform_(-0.9, 0.9))
            elif "conv1d" not in name:
                param.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model.eval()


def as_published(model, folder: Path, packed: bool = False, extra: bool = True) -> None:
    """Save as the hub does: bf16 with fp32 gates in Qwen3.5, several files, MTP
    weights."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder, max_shard_size="20KB")
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    fp32_gates = "Qwen3_5" in type(model).__name__
    for key, tensor in tensors.items():
        is_fp32 = fp32_gates and key.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[key] = tensor.to(F32 if is_fp32 else BF16)
    if packed:
        _pack_experts(tensors)
    if extra:
        tensors["mtp.fc.weight"] = torch.randn(24, 48, dtype=BF16)
        tensors["mtp.norm.weight"] = torch.randn(24, dtype=BF16)
    write_folder(tensors, folder, save_file)


def as_kimi_published(model, folder: Path) -> None:
    """Save as the hub has Kimi Linear: other names in config.json, and dense MLPs under
    their own name."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = {}
    for key, tensor in load_file(path).items():
        dense = key.replace("block_sparse_moe.", "mlp.")
        is_dense = dense.split(".mlp.")[-1] in DENSE
        is_fp32 = key.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        tensors[dense if is_dense else key] = tensor.to(F32 if is_fp32 else BF16)
    path.unlink()
    config = model.config
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    write_folder(tensors, folder, save_file)
    config_path = folder / "config.json"
    saved = json.loads(config_path.read_text())
    types = saved.pop("layer_types")
    mlps = saved.pop("mlp_layer_types")
    saved["first_k_dense_replace"] = mlps.count("dense")
    saved["linear_attn_config"] = {
        "full_attn_layers": [
            n for n, kind in enumerate(types, 1) if kind == "full_attention"
        ],
        "kda_layers": [
            n for n, kind in enumerate(types, 1) if kind == "linear_attention"
        ],
        "head_dim": saved.pop("linear_head_dim"),
        "num_heads": saved.pop("linear_num_heads"),
        "short_conv_kernel_size": saved.pop("linear_conv_kernel_dim"),
    }
    saved |= KIMI_PUBLISHED
    config_path.write_text(json.dumps(saved, indent=2) + "\n")


def write_folder(tensors, folder: Path, save_file, files: int = 3) -> None:
    """Deal the tensors out, sorted by name, so that fused ones straddle files."""
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {
            key: tensors[key].contiguous() for key in sorted(tensors)[number::files]
        }
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n"
    )


def _pack_experts(tensors) -> None:
    layers = {key.split("experts.0.")[0] for key in tensors if ".experts.0." in key}
    for layer in layers:
        per_expert = [
            [
                tensors.pop(f"{layer}experts.{e}.{n}_proj.weight")
                for n in ("gate", "up", "down")
            ]
            for e in range(MOE["num_experts"])
        ]
        tensors[f"{layer}experts.gate_up_proj"] = torch.stack(
            [torch.cat([gate, up]) for gate, up, _ in per_expert]
        )
        tensors[f"{layer}experts.down_proj"] = torch.stack(
            [down for *_, down in per_expert]
        )


FOLDERS = {
    "next": ("Qwen3NextForCausalLM", {}, {}),
    "next dense layer": ("Qwen3NextForCausalLM", {"mlp_only_layers": [1]}, {}),
    "dense": ("Qwen3_5ForCausalLM", {}, {}),
    "dense tied": ("Qwen3_5ForCausalLM", {"tie_word_embeddings": True}, {}),
    "dense ratio 1": ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 4}, {}),
    "dense ratio 3": ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 12}, {}),
    "next ratio 4": ("Qwen3NextForCausalLM", {"linear_num_value_heads": 16}, {}),
    "moe": ("Qwen3_5MoeForCausalLM", {}, {}),
    "moe packed": ("Qwen3_5MoeForCausalLM", {}, {"packed": True}),
    "only gdn": ("Qwen3_5ForCausalLM", {"layer_types": ["linear_attention"] * 4}, {}),
    "vision": ("Qwen3_5ForConditionalGeneration", {}, {}),
    "vision moe packed": ("Qwen3_5MoeForConditionalGeneration", {}, {"packed": True}),
}


# Kimi Linear, as the hub has it (a function of its own saves it) and as transformers
# saves it.
KIMI = "KimiLinearForCausalLM"
KIMI_FOLDERS = {
    "kimi": (KIMI, {"q_lora_rank": None}, None),
    "kimi tied": (KIMI, {"q_lora_rank": None, "tie_word_embeddings": True}, None),
    "kimi saved": (KIMI, {}, {"extra": False}),
    "kimi dense": (
        KIMI,
        {"q_lora_rank": None, "mlp_layer_types": ["dense"] * 4},
        {"extra": False},
    ),
    "kimi groups": (
        KIMI,
        {"q_lora_rank": None, "num_local_experts": 8, "n_group": 4, "topk_group": 1},
        {"extra": False},
    ),
}


def make_folder(name: str, folder: Path) -> None:
    family, changes, saving = (FOLDERS | KIMI_FOLDERS)[name]
    folder.mkdir()
    model = build(family, **changes)
    if saving is None:
        as_kimi_published(model, folder)
    else:
        as_published(model, folder, **saving)
