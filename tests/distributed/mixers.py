"""The mixers that are held to the laws of ``mixer_laws``: how they are built and shared
out."""

from dataclasses import replace
from functools import partial

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_gdn import (
    GatedDeltaNet2,
    GatedDeltaNetSubmodules,
    GatedDeltaProduct,
    GatedDeltaProductSubmodules,
    KimiDeltaAttention,
    Mamba2Mixer,
    Mamba2MixerSubmodules,
)
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.specs import kimi_delta_attention_spec
from tests import toy_mixer
from tests.distributed.layer_laws import build_layer, randomise_
from tests.distributed.mixer_laws import Mixers
from tests.parallel import make_config, share_of

LINEARS = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
PARTS = {**LINEARS, "out_norm": TorchRMSNorm}
HIDDEN = 20
DELTA_SIZES = {
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
MAMBA_SIZES = {
    "hidden_size": HIDDEN,
    "mamba_num_heads": 8,
    "mamba_num_groups": 2,
    "mamba_head_dim": 3,
    "mamba_state_dim": 5,
}


def config_of(sizes, **changes):
    return make_config(**{**sizes, **changes})


def in_its_dtype(mixer: torch.nn.Module) -> torch.nn.Module:
    """Of fp64 all of it, the fp32 parameters too, so that laws are held to fp64's
    rounding."""
    return mixer.double() if mixer.config.params_dtype == torch.float64 else mixer


def build_gdn(config, groups, **options):
    return in_its_dtype(build_layer(config, groups, options))


def build_gdn2(config, groups, **options):
    parts = GatedDeltaNetSubmodules(**PARTS)
    options = {"layer_number": 1, **options}
    return in_its_dtype(GatedDeltaNet2(config, parts, pg_collection=groups, **options))


LOW_RANKS = {"forget_rank": 6, "output_rank": 6}
FULL_GATES = {"forget_rank": 0, "output_rank": 0}


def build_kda(config, groups, **options):
    """With gates of low rank, as in Kimi Linear, unless ``options`` says otherwise."""
    parts = kimi_delta_attention_spec("local").submodules
    options = {"layer_number": 1, **LOW_RANKS, **options}
    return in_its_dtype(
        KimiDeltaAttention(config, parts, pg_collection=groups, **options)
    )


def build_mamba2(config, groups, **options):
    parts = Mamba2MixerSubmodules(**LINEARS)
    options = {"layer_number": 1, **options}
    mixer = Mamba2Mixer(
        config, parts, config.hidden_size, pg_collection=groups, **options
    )
    return in_its_dtype(mixer)


def build_gdp(config, groups, **options):
    parts = GatedDeltaProductSubmodules(**LINEARS)
    options = {"layer_number": 1, "num_householder": 2, **options}
    mixer = GatedDeltaProduct(
        config, parts, config.hidden_size, pg_collection=groups, **options
    )
    return in_its_dtype(mixer)


def draw_(mixer) -> None:
    """Every parameter away from its initial value; the convolution's output away from
    zero."""
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.add_(
                torch.randn_like(parameter) * (0.5 if "conv" in name else 0.1)
            )


GDN = Mixers(
    config=make_config,
    build=build_gdn,
    randomise=randomise_,
    share=share_of,
    # fp32: about 80 roundings, for sums of a few hundred terms in another order
    tolerance=1e-5,
    fp32=("A_log", "dt_bias"),
)
OLMO_HYBRID = replace(
    GDN,
    config=partial(
        make_config,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=96,
        linear_value_head_dim=192,
    ),
    build=partial(build_gdn, allow_neg_eigval=True),
)
KDA_FP32 = replace(
    GDN, config=partial(config_of, DELTA_SIZES), build=build_kda, randomise=draw_
)
GDN2_FP32 = replace(KDA_FP32, build=build_gdn2)
MAMBA2_FP32 = replace(
    KDA_FP32,
    config=partial(config_of, MAMBA_SIZES),
    build=build_mamba2,
    fp32=("A_log", "dt_bias", "D"),
)
GDP_FP32 = replace(KDA_FP32, config=partial(config_of, MAMBA_SIZES), build=build_gdp)
# Fields of Megatron main's config, with values that are not its defaults.
GDP_FIELDS_OF_MAIN = {
    "gdp_num_householder": 2,
    "gdp_cutedsl_kernel": True,
    "gdp_num_chunk_states_to_recompute": 5,
}
BY_NAME = {
    "gdn": GDN,
    "gdn2": GDN2_FP32,
    "gdp": GDP_FP32,
    "mamba2": MAMBA2_FP32,
    "kda": KDA_FP32,
}


def whole(kind: str, changes: dict | None = None, **options) -> torch.nn.Module:
    """One of ``BY_NAME`` on one rank, with random values; ``changes`` are the
    config's."""
    return BY_NAME[kind].whole(BY_NAME[kind].config(**(changes or {})), **options)


def in_fp64(kind: str, changes: dict | None = None, **options) -> torch.nn.Module:
    return whole(kind, {"params_dtype": torch.float64, **(changes or {})}, **options)


def _exactly(mixers: Mixers) -> Mixers:
    """In fp64 and deterministic mode: sums of some hundred terms that partly cancel."""
    fp64 = {"params_dtype": torch.float64, "deterministic_mode": True}
    return replace(mixers, config=partial(mixers.config, **fp64), tolerance=1e-11)


MAMBA2, KDA, GDN2, GDP = map(_exactly, (MAMBA2_FP32, KDA_FP32, GDN2_FP32, GDP_FP32))
# in_proj makes the gates, and beta comes beside its rows
KDA_FULL = replace(KDA, build=partial(build_kda, **FULL_GATES))
TOY = Mixers(
    config=partial(make_config, deterministic_mode=True),
    build=toy_mixer.ToyMixer,
    randomise=randomise_,
    share=share_of,
    tolerance=1e-5,  # as Gated DeltaNet's
    fp32=("decay_bias",),
)
