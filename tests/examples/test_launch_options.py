"""``MEGATRON_GDN_OPTIONS``: options of the layer in a launch, where ``--spec`` takes none."""

import pytest

from megatron_gdn.specs.launch_options import VARIABLE, parse_options
from tests.processes import python


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("linear_cp_mode=chunkwise", {"linear_cp_mode": "chunkwise"}),
        ("cp_ranks_per_machine=4", {"cp_ranks_per_machine": 4}),
        ("backend=fla, recompute_qkv=True,", {"backend": "fla", "recompute_qkv": True}),
        (" A_init_range=(1, 16) conv_init=0.1", {"A_init_range": (1, 16), "conv_init": 0.1}),
    ],
)
def test_names_and_values_are_read(text, options):
    assert parse_options(text) == options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cp_layuot=zigzag", "cp_layout"),
        ("layer_number=3", "the names A_init_range, allow_neg_eigval"),
        ("chunkwise", "it must be name=value"),
        ("recompute_qkv=true", "recompute_qkv='true'; it must be True or False"),
    ],
)
def test_what_is_no_option_is_refused_and_the_legal_names_are_said(text, said):
    with pytest.raises(ValueError, match=VARIABLE) as error:
        parse_options(text)
    assert said in str(error.value)


SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_gdn.specs import gpt_block_spec, hybrid_stack_spec

def options(layer):
    return layer.submodules.self_attention.params

def of_both(hybrid):
    layers = hybrid.submodules
    return options(layers.gdn_layer), layers.mamba_layer.submodules.mixer.params

def of_k(hybrid):
    return options(hybrid.params["kda_layer"])

config = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl="local",
    experimental_attention_variant="gated_delta_net", linear_attention_freq=[1],
)
print(of_both(hybrid_stack_spec), options(gpt_block_spec(config, pp_rank=0).layer_specs[0]))
print(of_both(hybrid_stack_spec("local", linear_cp_mode="headwise")))
print(of_k(hybrid_stack_spec), of_k(hybrid_stack_spec("local", kda={"gate_lower_bound": -4.0})))
print(of_k(hybrid_stack_spec("local", recompute="none")))
"""


def test_the_specs_of_a_launch_take_them_and_calls_go_before_them(monkeypatch):
    monkeypatch.setenv(
        VARIABLE, "linear_cp_mode=chunkwise,recompute=full,gate_lower_bound=-5.0,backend=flash_qla"
    )
    ran = python("-c", SCRIPT)
    chunkwise = {"linear_cp_mode": "chunkwise"}
    launched = chunkwise | {"recompute": "full", "backend": "flash_qla"}
    of_k = chunkwise | {"recompute": "full"}
    named = launched | {"linear_cp_mode": "headwise"}
    assert ran.stdout.splitlines()[-4:] == [
        f"{(launched, chunkwise)} {launched}",
        f"{(named, {'linear_cp_mode': 'headwise'})}",
        f"{of_k | {'gate_lower_bound': -5.0}} {of_k | {'gate_lower_bound': -4.0}}",
        f"{chunkwise | {'gate_lower_bound': -5.0}}",
    ]
    assert f"{VARIABLE}: layers are built with linear_cp_mode='chunkwise'" in ran.stderr
