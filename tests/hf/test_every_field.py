"""Every field of a config.json is accounted for: a changed field changes the model, or
is refused, or is named as one that changes no number."""

import copy
import json
import math
from typing import NamedTuple

import pytest
import torch
import transformers

from megatron_gdn.hf import parse_hf_config
from megatron_gdn.hf import qwen as qwen_fields
from megatron_gdn.hf.field_groups import FieldGroups
from megatron_gdn.hf.kimi import KIMI_FIELDS
from megatron_gdn.hf.nemotron import NEMOTRON_FIELDS
from tests.hf.test_kimi import PUBLISHED as KIMI
from tests.hf.tiny_models import COMMON, KDA, LATENT, MOE, model_class
from tests.hostile.test_configs import NEMOTRON

# Beside the fields of transformers' class, of published files.
QWEN3_NEXT = {
    "full_attention_interval": 4,
    "rope_scaling": None,
    "use_sliding_window": False,
}
QWEN3_5 = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}
VISION = {
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_config": {"depth": 1},
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
}


def of_class(kind: str, architecture: str, **settings) -> dict:
    """What a file of transformers' config class ``kind`` says."""
    if "time_step_limit" in settings:
        settings["time_step_limit"] = [0.0, math.inf]
    made = getattr(transformers, kind)(**settings).to_dict()
    said = json.loads(json.dumps(made, default=str))
    return said | {"architectures": [architecture]}


DENSE = COMMON | {"intermediate_size": 20, "linear_conv_kernel_dim": 4}
EXPERTS = COMMON | MOE | {"linear_conv_kernel_dim": 4}
QWEN35_DENSE = of_class("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **DENSE) | QWEN3_5
QWEN35_EXPERTS = (
    of_class("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", **EXPERTS) | QWEN3_5
)


def with_vision(text: dict, architecture: str) -> dict:
    own = {k: v for k, v in text.items() if k != "architectures"}
    top = {"architectures": [architecture], "tie_word_embeddings": False}
    return top | VISION | {"text_config": own | {"tie_word_embeddings": True}}


FILES = {
    "Qwen3-Next": of_class("Qwen3NextConfig", "Qwen3NextForCausalLM", **DENSE, **MOE)
    | QWEN3_NEXT
    | {"mlp_only_layers": [1]},
    "Qwen3-Next, experts in every layer": of_class(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", **DENSE, **MOE
    )
    | QWEN3_NEXT,
    "Qwen3.5": QWEN35_DENSE,
    "Qwen3.5 with experts": QWEN35_EXPERTS,
    "Qwen3.5 with vision": with_vision(QWEN35_DENSE, "Qwen3_5ForConditionalGeneration"),
    "Qwen3.5 with experts and vision": with_vision(
        QWEN35_EXPERTS, "Qwen3_5MoeForConditionalGeneration"
    ),
    "Kimi Linear": KIMI,
    "Kimi Linear of transformers": of_class(
        "KimiLinearConfig", "KimiLinearForCausalLM", **KDA | LATENT
    )
    | {"rope_theta": 10000.0},
    "NemotronH": NEMOTRON,
    "NemotronH of transformers": of_class(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        **{k: v for k, v in NEMOTRON.items() if k != "architectures"},
    )
    | {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
}
GROUPS = {
    "Qwen3-Next": qwen_fields.QWEN3_NEXT_FIELDS,
    "Qwen3.5": qwen_fields.QWEN3_5_FIELDS,
    "Qwen3.5 with experts": qwen_fields.QWEN3_5_MOE_FIELDS,
    "Kimi Linear": KIMI_FIELDS,
    "NemotronH": NEMOTRON_FIELDS,
}
# Fields of layers that a model may lack -> the symbols of these layers.
OF_LAYERS = {"intermediate_size": "-"}


class Change(NamedTuple):
    name: str
    path: tuple[str, ...]
    value: object

    def made_in(self, file: dict) -> dict:
        changed = copy.deepcopy(file)
        place = changed
        for name in self.path[:-1]:
            place = place[name]
        place[self.path[-1]] = self.value
        return changed


def other_value(value: object) -> object:
    if value is None:
        return 3
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value or 1
    if isinstance(value, str):
        return f"{value}_2"
    if isinstance(value, list):
        return value[1:] if len(value) > 1 else [*value, 5]
    return {"another": 1}


def changes_of(file: dict, path: tuple[str, ...] = ()):
    """A change of each field of a file, and of its nested objects."""
    for name, value in file.items():
        here = (*path, name)
        if isinstance(value, dict) and name in (
            "text_config",
            "rope_parameters",
            "linear_attn_config",
        ):
            yield from changes_of(value, here)
        yield Change(name, here, other_value(value))


def may_change_nothing(change: Change, file: dict, pattern: str) -> bool:
    """Whether a group names the field as one that changes no number of this model."""
    if change.path[0] == "rope_parameters" or change.path[:2] == (
        "text_config",
        "rope_parameters",
    ):
        return change.name.startswith("mrope_")
    groups = group_of(file)
    if "text_config" in file and len(change.path) == 1:
        groups = qwen_fields.TOP_LEVEL_FIELDS
    usual = groups.other_names.get(change.name, change.name)
    in_text = change.path[0] == "text_config"
    if in_text and change.name in ("architectures", "tie_word_embeddings"):
        return True  # the top level's is read
    if usual in groups.without_effect:
        return True
    return usual in OF_LAYERS and OF_LAYERS[usual] not in pattern


def group_of(file: dict) -> FieldGroups:
    (architecture,) = file["architectures"]
    if architecture.startswith("Qwen"):
        return qwen_fields.FIELDS_OF_ARCHITECTURE[architecture]
    return KIMI_FIELDS if architecture.startswith("Kimi") else NEMOTRON_FIELDS


@pytest.mark.parametrize("name", FILES)
def test_a_changed_field_changes_the_model_or_is_refused_or_named(name):
    file = FILES[name]
    config = parse_hf_config(file)
    silent = []
    for change in changes_of(file):
        try:
            found = parse_hf_config(change.made_in(file))
        except ValueError:
            continue
        if found == config and not may_change_nothing(
            change, file, config.hybrid_layer_pattern
        ):
            silent.append(".".join(change.path))
    assert silent == []


@pytest.mark.parametrize("name", FILES)
def test_a_field_that_no_group_has_is_refused(name):
    file = FILES[name]
    with pytest.raises(ValueError, match="'mixer_gain'.* not known as fields of a"):
        parse_hf_config(file | {"mixer_gain": 2})
    for nested in ("text_config", "rope_parameters", "linear_attn_config"):
        if nested in file and name.split()[0] in ("Qwen3.5", "Kimi"):
            inside = {**file[nested], "mixer_gain": 2}
            with pytest.raises(ValueError, match="mixer_gain"):
                parse_hf_config(file | {nested: inside})


@pytest.mark.parametrize("name", GROUPS)
def test_no_field_is_in_two_groups(name):
    groups = GROUPS[name]
    parts = groups.read_fields, groups.setting_fields, groups.without_effect.keys()
    assert sum(map(len, parts)) == len(frozenset().union(*parts))
    assert {*groups.other_names.values()} <= frozenset().union(*parts)


@pytest.mark.parametrize("name", GROUPS)
def test_a_field_has_one_name_in_the_file(name):
    """So `ConfigFields` looks for a field by its name in the file alone."""
    groups = GROUPS[name]
    legal = groups.read_fields | groups.setting_fields
    assert groups.names_in_table.keys() <= legal
    assert not legal & set(groups.names_in_table.values())


@pytest.mark.parametrize("name", FILES)
def test_a_field_that_is_left_out_is_what_transformers_takes_or_missed_by_name(name):
    """transformers' class says what a file without the field means."""
    file = FILES[name]
    (architecture,) = file["architectures"]
    kinds = {
        "Qwen3NextForCausalLM": "Qwen3NextConfig",
        "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
        "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
        "KimiLinearForCausalLM": "KimiLinearConfig",
        "NemotronHForCausalLM": "NemotronHConfig",
    }
    if architecture not in kinds:
        pytest.skip("its text_config is another row's file")
    for left_out in file:
        if left_out == "architectures":
            continue
        rest = {k: v for k, v in file.items() if k != left_out}
        try:
            found = parse_hf_config(rest)
        except ValueError as error:
            assert "has no" in str(error) or "contradict" in str(error), error
            continue
        theirs = of_class(
            kinds[architecture],
            architecture,
            **{k: v for k, v in rest.items() if k not in ("architectures", "dtype")},
        )
        theirs = {k: v for k, v in theirs.items() if k != "time_step_limit"}
        expected = parse_hf_config(theirs)
        assert found == expected, left_out


# Fields of transformers' class that are no setting of the model that it builds.
NOT_BUILT = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "problem_type",
    "return_dict",
    "transformers_version",
}
CLASSES = {
    "Qwen3-Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Qwen3.5 with experts": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "Kimi Linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "NemotronH": ("NemotronHConfig", "NemotronHForCausalLM"),
}
SMALL = {
    "Qwen3-Next": DENSE | MOE,
    "Qwen3.5": DENSE,
    "Qwen3.5 with experts": EXPERTS,
    "Kimi Linear": KDA | LATENT | {"num_local_experts": 4},
    "NemotronH": {k: v for k, v in NEMOTRON.items() if k != "architectures"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_transformers_model_has_the_same_logits_without_what_changes_no_number(name):
    """Each field of transformers' class that is named as one without effect."""
    kind, architecture = CLASSES[name]
    settings = SMALL[name] | {"pad_token_id": 0}
    config_class = getattr(transformers, kind)
    said = config_class(**settings).to_dict()
    tokens = torch.arange(40)[None] % said["vocab_size"]

    def model_of(**changes):
        torch.manual_seed(1)
        config = config_class(**settings | changes)
        return model_class(architecture)(config).eval()

    base = model_of()
    groups = GROUPS[name]
    usual = {field: groups.other_names.get(field, field) for field in said}
    changed = [field for field in said if usual[field] in groups.without_effect]
    changed = sorted({*changed} - NOT_BUILT)
    assert len(changed) > 8
    with torch.no_grad():
        expected = base(tokens, use_cache=False).logits
        for field in changed:
            value = said[field]
            other = model_of(**{field: 3 if value is None else other_value(value)})
            other.load_state_dict(base.state_dict())
            found = other(tokens, use_cache=False).logits
            assert torch.equal(found, expected), field
