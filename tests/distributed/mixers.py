"""The mixers that are held to the laws of ``mixer_laws``."""

from dataclasses import replace
from functools import partial

import torch

from tests import kda_mixers, mamba_mixers, parallel, toy_mixer
from tests.distributed.layer_laws import build_layer, randomise_
from tests.distributed.mixer_laws import Mixers
from tests.gdn2 import mixers as gdn2_mixers


def build_gdn(config, groups, **options):
    return build_layer(config, groups, options)


GDN = Mixers(
    config=parallel.make_config,
    build=build_gdn,
    randomise=randomise_,
    share=parallel.share_of,
    tolerance=1e-5,  # fp32: about 80 roundings, for sums of a few hundred terms in another order
    fp32=("A_log", "dt_bias"),
)
OLMO_HYBRID = replace(
    GDN,
    config=partial(
        parallel.make_config, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=96, linear_value_head_dim=192,
    ),
    build=partial(build_gdn, allow_neg_eigval=True),
)  # fmt: skip
MAMBA2_FP32 = replace(
    GDN, config=mamba_mixers.mamba_config, build=mamba_mixers.build,
    randomise=mamba_mixers.randomise_, share=mamba_mixers.share_of,
    fp32=("A_log", "dt_bias", "D"),
)  # fmt: skip
KDA_FP32 = replace(
    MAMBA2_FP32, config=kda_mixers.kda_config, build=kda_mixers.build, fp32=("A_log", "dt_bias")
)
GDN2_FP32 = replace(KDA_FP32, config=gdn2_mixers.gdn2_config, build=gdn2_mixers.build)
BY_NAME = {"gdn": GDN, "gdn2": GDN2_FP32, "mamba2": MAMBA2_FP32, "kda": KDA_FP32}


def whole(kind: str, changes: dict | None = None, **options) -> torch.nn.Module:
    """One of ``BY_NAME`` in fp32 on one rank, with random values; ``changes`` are the config's."""
    return BY_NAME[kind].whole(BY_NAME[kind].config(**(changes or {})), **options)


def _exactly(mixers: Mixers) -> Mixers:
    """In fp64 and deterministic mode: sums of some hundred terms that partly cancel."""
    fp64 = {"params_dtype": torch.float64, "deterministic_mode": True}
    return replace(mixers, config=partial(mixers.config, **fp64), tolerance=1e-11)


MAMBA2, KDA, GDN2 = map(_exactly, (MAMBA2_FP32, KDA_FP32, GDN2_FP32))
TOY = Mixers(
    config=partial(parallel.make_config, deterministic_mode=True),
    build=toy_mixer.ToyMixer,
    randomise=randomise_,
    share=toy_mixer.share_of,
    tolerance=1e-5,  # as Gated DeltaNet's
    fp32=("decay_bias",),
)
