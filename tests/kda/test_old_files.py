"""A checkpoint whose gates have another rank than the model's is refused by name."""

from types import SimpleNamespace

import pytest

from megatron_gdn.compat.kda_files import _require_same_rank

LAYER = "decoder.layers.self_attention."


@pytest.mark.parametrize(
    ("asked", "stored", "setting"),
    [
        ("f_a_proj.weight", "in_proj.weight.g", "kda_f_lora_rank=0"),
        ("f_a_proj.weight", "in_proj.weight.f", "kda_f_lora_rank=0"),
        ("f_proj.weight", "f_a_proj.weight", "kda_f_lora_rank=6"),
        ("in_proj.weight.gate", "g_a_proj.weight", "kda_gate_lora_rank=6"),
        ("g_proj.weight", "in_proj.weight.z_a", "kda_gate_lora_rank=6"),
    ],
)
def test_a_gate_of_another_rank_names_the_setting_to_change(asked, stored, setting):
    entry = SimpleNamespace(size=(6, 24))
    with pytest.raises(ValueError, match=f"has {LAYER}{stored}.*Set {setting} "):
        _require_same_rank(f"{LAYER}{asked}", {f"{LAYER}{stored}": entry})
    _require_same_rank(f"{LAYER}{asked}", {f"{LAYER}q_norm.weight": entry})
