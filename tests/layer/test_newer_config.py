"""What Megatrons' configs say about the layers: honoured, named in the log, or
refused."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_gdn
from megatron_gdn import specs
from megatron_gdn.mamba2.layer import MAMBA2_CONFIG_FIELDS
from megatron_gdn.mixers.arguments import GDN_CONFIG_FIELDS
from megatron_gdn.specs import gated_delta_net_spec, gpt_block_spec, mamba2_spec
from tests.megatron_sources import SOURCES, choices_of, config_fields
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")

# folders of the package's own code; specs is a link in an installed clone
OURS = tuple(
    str(Path(module.__file__).resolve().parent) for module in (megatron_gdn, specs)
)
ABOUT = {"GatedDeltaNet": GDN_CONFIG_FIELDS, "Mamba2Mixer": MAMBA2_CONFIG_FIELDS}
MIXERS = pytest.mark.parametrize("mixer", ABOUT)


def build(mixer="GatedDeltaNet", **values):
    """A layer under a config with these fields, of which 0.19's constructor does not
    know all."""
    config = make_config()
    vars(config).update(values)
    return build_under(config, mixer)


def build_under(config, mixer="GatedDeltaNet"):
    if mixer == "GatedDeltaNet":
        return build_module(gated_delta_net_spec("local"), config, layer_number=1)
    return build_module(mamba2_spec("local"), config, d_model=config.hidden_size)


def selective(*names, **values):
    return build(
        recompute_granularity="selective", recompute_modules=[*names], **values
    )


def test_another_variant_is_refused_by_name():
    with pytest.raises(
        ValueError, match="'gdn2' asks for Gated DeltaNet 2.*GatedDeltaNet2"
    ):
        build(experimental_attention_variant="gdn2")


def said(log) -> str:
    """What the log says about settings."""
    of_settings = [
        m for m in log.messages if "no effect" in m or "recompute-modules" in m
    ]
    return " ".join(of_settings)


def named_in(log) -> set[str]:
    return {word.split("=")[0] for word in said(log).replace("config.", "").split()}


@MIXERS
@pytest.mark.parametrize("core", SOURCES)
def test_every_field_about_a_mixer_is_read_or_named(core, mixer, log):
    """Set to a value that no default has."""
    about = ABOUT[mixer]
    known = {name for name in config_fields(core) if name.startswith(about.prefixes)}
    assert known
    unread = known - set(about.with_effect)
    build(mixer, **dict.fromkeys(unread, 12345))
    assert unread <= named_in(log)


def test_the_fields_that_are_said_to_be_read_are_read():
    read = set()

    class Recording(TransformerConfig):
        def __getattribute__(self, name):
            caller = Path(sys._getframe(1).f_code.co_filename).resolve()
            if str(caller).startswith(OURS):
                read.add(name)
            return super().__getattribute__(name)

    values = {
        field.name: getattr(make_config(), field.name)
        for field in fields(TransformerConfig)
    }
    values |= {"linear_attention_freq": 2, "transformer_impl": "local", "num_layers": 2}
    values |= {"experimental_attention_variant": "gated_delta_net"}
    config = Recording(**values)
    for mixer in ABOUT:
        build_under(config, mixer)
    gpt_block_spec(config)
    # Megatron's own function, which the spec calls, reads this one.
    assert {name for about in ABOUT.values() for name in about.with_effect} - read <= {
        "linear_attention_freq"
    }


@MIXERS
def test_fields_with_their_defaults_are_not_named(mixer, log):
    build(mixer)
    assert "has no effect" not in log.text


def test_fields_without_effect_are_named_once(log):
    for _ in range(2):
        build(
            gdn_pre_gated_delta_rule_fusion=True,
            gdn_conv_pad_alignment=64,
            gdn_new_fusion=True,
        )
    assert log.text.count("gdn_pre_gated_delta_rule_fusion=True has no effect") == 1
    assert log.text.count("gdn_conv_pad_alignment=64 has no effect") == 1
    assert (
        "gdn_new_fusion=True has no effect: this version of GatedDeltaNet does not"
        in log.text
    )
    log.clear()
    build(gdn_pre_gated_delta_rule_fusion=False, gdn_conv_pad_alignment=None)
    assert "has no effect" not in log.text
    build(
        "Mamba2Mixer",
        use_mamba_mem_eff_path=False,
        mamba_training_ssm_states_dtype=torch.half,
    )
    assert "Mamba2Mixer: config.use_mamba_mem_eff_path=False has no effect" in log.text
    assert "mamba_training_ssm_states_dtype=torch.float16 has no effect" in log.text


@pytest.mark.parametrize("core", SOURCES)
def test_every_part_to_recompute_is_recomputed_or_named(core, log):
    parts = choices_of(core, "recompute_modules")
    assert "core_attn" in parts
    for part in parts:
        log.clear()
        layer = selective(part)
        switched = layer.recompute_layer, layer.recompute_norm_out, layer.recompute_qkv
        assert sum(switched) + bool(said(log)) == part.startswith("gdn"), part


def test_an_activation_of_the_output_gate_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="output_gate_activation='tanh'; use one of"):
        build(gdn_output_gate_activation="tanh")


def test_parts_to_recompute_that_are_not_known_are_named(log):
    layer = selective("gdn_qkv", "gdn_norm_out")
    assert (layer.recompute_qkv, layer.recompute_norm_out) == (False, True)
    assert "recompute-modules gdn_qkv has no effect" in log.text


def test_recomputing_the_whole_layer_keeps_its_input_alone(log):
    layer = selective("gdn")
    x = torch.randn(9, 1, 24, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        layer(x, None)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
    assert not said(log)


def test_recomputing_the_whole_layer_leaves_a_frozen_input_its_weights_gradients():
    layer = selective("gdn")
    layer(torch.randn(9, 1, 24), None)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("core", SOURCES)
def test_parts_to_offload_that_the_layer_lacks_are_named(core, log):
    parts = choices_of(core, "offload_modules")
    build(fine_grained_activation_offloading=True, offload_modules=sorted(parts))
    of_attention = {name for name in parts if "attn" in name or "qkv" in name}
    around = {"attn_norm"} | {name for name in parts if name.startswith("gdp")}
    assert named_in(log) & parts == of_attention - around
    log.clear()
    build(
        fine_grained_activation_offloading=True,
        offload_modules=["attn_norm", "moe_act"],
    )
    build(offload_modules=["core_attn"])
    assert not said(log)


def test_linears_that_cannot_run_in_the_fp8_that_is_asked_for_are_named(log):
    build()
    assert "FP8" not in log.text
    build(fp8="hybrid")
    assert "FP8 has no effect on projections of ColumnParallelLinear" in log.text
