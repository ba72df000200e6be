"""megatron-core's own Gated DeltaNet, made to run on the CPU:
``GDN_TEST_LAYER=upstream TORCHDYNAMO_DISABLE=1 pytest tests/layer/test_upstream_flaws.py``
builds it instead of ours, and every test there then fails, which is how we know that it
can."""

import importlib
import os

import megatron.core
import pytest
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_gdn.specs import gated_delta_net_spec

TESTING_UPSTREAM = os.environ.get("GDN_TEST_LAYER") == "upstream"
with_gdn_norm_out = pytest.mark.skipif(
    megatron.core.__version__.startswith("0.18."),
    reason="the config of megatron-core 0.18 refuses gdn_norm_out in recompute_modules",
)


def gdn_module():
    """The module under test: ours, or upstream's."""
    return (
        upstream_on_cpu()
        if TESTING_UPSTREAM
        else importlib.import_module("megatron_gdn")
    )


def upstream_on_cpu():
    """Upstream's module, with what stands in for fla's kernels from now on."""
    import megatron.core.ssm.gated_delta_net as package

    from megatron_gdn.ops import causal_conv1d, l2norm

    # In 0.18 the layer is one file. fla's kernels need a GPU.
    gdn, common = (getattr(package, name, package) for name in ("gdn", "common"))
    gdn2 = getattr(package, "gdn2", package)  # of Megatron-LM's main
    gdn.l2norm = gdn2.l2norm = common.l2norm = lambda x, **kwargs: l2norm(x, **kwargs)
    gdn.causal_conv1d = gdn2.causal_conv1d = (
        lambda x, weight, bias, activation, cu_seqlens, **_: causal_conv1d(
            x, weight, bias, activation, cu_seqlens=cu_seqlens
        )
    )
    gdn.chunk_gated_delta_rule = package.torch_chunk_gated_delta_rule
    if gdn2 is not package:
        gdn2.chunk_gdn2 = gdn2.torch_chunk_gdn2
    return package


def layer_spec(**params) -> ModuleSpec:
    spec = gated_delta_net_spec("local", **params)
    if TESTING_UPSTREAM:
        package = gdn_module()
        parts = spec.submodules
        spec.module = package.GatedDeltaNet
        spec.submodules = package.GatedDeltaNetSubmodules(
            in_proj=parts.in_proj, out_norm=parts.out_norm, out_proj=parts.out_proj
        )
    return spec
