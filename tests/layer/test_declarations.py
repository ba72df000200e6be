"""What each mixer declares: its parameters, sections, gates, states, rules and marks."""

import inspect
import os
from pathlib import Path

import pytest
import torch
from megatron.core.transformer import MegatronModule

from megatron_gdn.mixers.base import RecurrentMixer
from tests.distributed.mixers import BY_NAME, whole
from tests.in_words import in_words, read, write

pytestmark = pytest.mark.usefixtures("one_rank")

FILE = Path(__file__).with_name("declarations.json")
# What Megatron and the code of all mixers read of a mixer.
MARKS = (
    "allows_zero_in_A_init_range",
    "chunk_size",
    "conv_init_bounds_bias",
    "conv_is_module",
    "fp32",
    "gate_reads_own_rows",
    "launch_arguments",
    "may_be_captured",
    "output_gate_activation",
    "parameters_split_by_heads",
    "recompute_modules",
    "recurrence",
    "section_outside_fp8",
    "state_transposed",
    "use_muon",
    "uses_attention_mask",
)


# Class variables that are not among MARKS: classes, and what test_either_mixer.py holds.
NOT_MARKS = {
    "attn_mask_type",
    "known_config_fields",
    "options_class",
    "scripts_split_in_proj",
}


def test_what_a_class_of_mixers_declares_is_among_the_marks():
    declared = inspect.get_annotations(RecurrentMixer)
    names = {name for name, kind in declared.items() if "ClassVar" in str(kind)}
    assert len(names) > 10 and names - set(MARKS) == NOT_MARKS


def parameter_in_words(x):
    """With the marks by which tensor-parallel ranks share it out."""
    marks = ("tensor_model_parallel", "partition_dim", "sequence_parallel")
    return [list(x.shape), str(x.dtype), [getattr(x, mark, None) for mark in marks]]


def attributes(mixer):
    """Public numbers and texts of the mixer and of its classes, many under names of
    Megatron's layers."""
    upstream = {"training", *vars(MegatronModule(mixer.config))}
    own = {
        name: x
        for cls in reversed(type(mixer).__mro__)
        if cls.__module__.startswith("megatron_gdn")
        for name, x in vars(cls).items()
        if name not in MARKS
    }
    own |= {name: x for name, x in vars(mixer).items() if name not in upstream}
    return {
        name: in_words(x)
        for name, x in sorted(own.items())
        if name[0] != "_" and isinstance(x, bool | int | float | str | tuple)
    }


def declared(mixer):
    stages = mixer.stages_of_whole_sequences(torch.zeros(1, 1, mixer.dims.layout.width))
    parameters = mixer.named_parameters()
    return {
        "attributes": attributes(mixer),
        "marks": {name: in_words(getattr(mixer, name)) for name in MARKS},
        "absent options": in_words(mixer.options_class.absent_options),
        "sizes": in_words(mixer.dims),
        "in_proj": in_words(getattr(mixer.dims, "in_proj_layout", None)),
        "parameters": [[name, *parameter_in_words(x)] for name, x in parameters],
        "table": in_words(stages.table),
        "memory": in_words(stages.memory_shape),
        "readout": in_words(stages.readout),
        "rule": [stages.rule.name, in_words(stages.rule.bits), stages.recompute],
        "rules": [
            [x.__name__, in_words(x.strongest_promise)]
            for x in mixer.options_class.rules
        ],
    }


OF_LAYERS = {"pp_layer_offset": 2, "conv_init": 0.1}
OF_DELTA_RULES = OF_LAYERS | {"bias": True, "conv_bias": True, "use_qk_l2norm": False}
OF_MAMBA = OF_LAYERS | {
    "A_init_range": (2, 5),
    "dt_min": 0.01,
    "dt_max": 0.2,
    "dt_init_floor": 1e-3,
    "chunk_size": 32,
}
# Options that are not the defaults.
OTHERS = {
    "gdn": {"output_gate_activation": "sigmoid", "allow_neg_eigval": True},
    "gdn2": {},
    "gdp": {"num_householder": 3, "bias": True, "conv_bias": True},
    "kda": {"gate_lower_bound": -4.0, "muon_per_head": True},
    "mamba2": {"D_has_hdim": True, "dt_limit": (0.01, 2.0), "norm_eps": 1e-4},
}


def options_of(kind, others):
    if not others:
        return {}
    return OTHERS[kind] | (OF_MAMBA if kind in ("gdp", "mamba2") else OF_DELTA_RULES)


@pytest.mark.parametrize("others", [False, True], ids=["defaults", "others"])
@pytest.mark.parametrize("kind", BY_NAME)
def test_declarations_stay(kind, others):
    """A changed one changes checkpoints or optimizers. A failing test writes what it
    found beside the file if NEW_DECLARATIONS names a file."""
    found = declared(whole(kind, **options_of(kind, others)))
    name = f"{kind}, others" if others else kind
    new = os.environ.get("NEW_DECLARATIONS")
    if new:
        known = read(Path(new)) if Path(new).exists() else {}
        write(Path(new), known | {name: found})
    assert found == read(FILE)[name]
