"""The small models whose checkpoints are kept, what is done with them on the ranks of a
test."""

import json
from pathlib import Path

from tests.parallel import parallel
from tests.precision.training import (
    Training,
    build_model,
    load,
    save,
    tensors_in,
    train_step,
    wrap,
)

FILES = Path(__file__).parent / "files"
KIND = "fully_reshardable"
RANKS = (1, 2)  # tensor-parallel sizes
# Gates of low rank, which version 0.1 had by default.
LOW = {"spec_options": {"kda": {"forget_rank": 12, "output_rank": 12}}}
# Small, so that the files are.
SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "mamba_num_heads": 4,
    "mamba_num_groups": 2,
    "mamba_head_dim": 4,
    "mamba_state_dim": 3,
}
LOW_OF_SIZES = {"spec_options": {"kda": {"forget_rank": 6, "output_rank": 4}}}
STEPS_OF_TOKEN = {"spec_options": {"gdp": {"num_householder": 2}}}
# Pattern, and changes of the config or of the spec: what this version writes.
MODELS = {
    "gdn": ("G-", SIZES),
    "gdn2": ("G-", {"experimental_attention_variant": "gdn2", **SIZES}),
    "gdp": ("M-", {**STEPS_OF_TOKEN, **SIZES}),
    "kda": ("K-", SIZES),
    "kda_low_rank": ("K-", {**LOW_OF_SIZES, **SIZES}),
    "mamba2": ("M-", SIZES),
}
# What earlier versions wrote, if it was something else.
MODELS_OF = {
    "0.1.0": {
        "gdn": ("G-", {}),
        "gdn2": ("G-", {"experimental_attention_variant": "gdn2"}),
        "kda": ("K-", LOW),
        "mamba2": ("M-", {}),
    },
}
STEPS = range(2)  # that were taken before the checkpoint; the next one's loss is kept


def models_of(version: str) -> dict[str, tuple[str, dict]]:
    return MODELS_OF.get(version, MODELS)


def build(version: str, name: str, tp: int, seed: int = 5) -> Training:
    pattern, changes = models_of(version)[name]
    return wrap(KIND, build_model(tp, pattern=pattern, seed=seed, **changes))


def train_and_save(version: str, name: str, tp: int, folder: str) -> None:
    """A checkpoint in ``folder``, and beside it the loss of the next step."""
    with parallel(tp=tp):
        training = build(version, name, tp)
        for step in STEPS:
            train_step(training, step)
        save(training, folder)
        loss = train_step(training, len(STEPS))
        Path(f"{folder}.json").write_text(json.dumps(loss))


def load_and_save(version: str, name: str, tp: int, folder: str, again: str) -> float:
    """Loads a kept checkpoint into other weights, saves it again, and takes the next
    step."""
    with parallel(tp=tp):
        training = build(version, name, tp, seed=99)
        load(training, folder)
        save(training, again)
        return train_step(training, len(STEPS))


# Ends of keys of Kimi Delta Attention in version 0.1, and what they are called now.
RENAMED = {
    ".self_attention.in_proj.layer_norm_weight": ".input_layernorm.weight",
    ".in_proj.weight.beta": ".beta_proj.weight",
    ".in_proj.weight.f_a": ".f_a_proj.weight",
    ".in_proj.weight.z_a": ".g_a_proj.weight",
    ".f_b_weight": ".f_b_proj.weight",
    ".z_b_weight": ".g_b_proj.weight",
}


def _name_of_today(key: str) -> str:
    for old, new in RENAMED.items():
        if key.endswith(old):
            return key.removesuffix(old) + new
    return key


def differences(version: str, name: str, folder: str, again: str) -> list[str]:
    """The tensors of two checkpoints that are not equal bit for bit, and those of one
    side only."""
    kept = tensors_in(folder)
    if version == "0.1.0" and name == "kda":
        kept = {_name_of_today(key): tensor for key, tensor in kept.items()}
    found = tensors_in(again)
    return sorted(
        key
        for key in kept.keys() | found.keys()
        if key not in kept
        or key not in found
        or kept[key].dtype != found[key].dtype
        or not kept[key].equal(found[key])
    )
