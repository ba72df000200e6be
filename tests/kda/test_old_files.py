"""A checkpoint whose gates have another rank than the model's is refused by name."""

from types import SimpleNamespace

import pytest
from megatron.core import dist_checkpointing

from megatron_gdn.compat.kda_files import _require_same_rank
from tests.distributed.mixers import BY_NAME
from tests.distributed.model_laws import metadata
from tests.parallel import groups_of_megatron
from tests.ranks import on_ranks

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


@pytest.mark.parametrize("option", ["forget_rank", "output_rank"])
@pytest.mark.parametrize(("saved", "asked"), [(0, 6), (6, 0)])
@on_ranks(cp=1)
def test_a_file_whose_gate_has_another_rank_is_refused(tmp_path, option, saved, asked):
    def state(rank):
        ranks = {"forget_rank": 6, "output_rank": 6, option: rank}
        layer = BY_NAME["kda"].build(
            BY_NAME["kda"].config(), groups_of_megatron(), **ranks
        )
        return layer.sharded_state_dict("layer.", metadata=metadata())

    dist_checkpointing.save(state(saved), str(tmp_path))
    field = {"forget_rank": "kda_f_lora_rank", "output_rank": "kda_gate_lora_rank"}
    with pytest.raises(ValueError, match=f"Set {field[option]}={saved} in the config"):
        dist_checkpointing.load(state(asked), str(tmp_path))
