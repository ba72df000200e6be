"""Newer Megatrons' own Kimi Delta Attention on the CPU: stand-ins for fla's kernels."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net as package
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from megatron_gdn.ops import causal_conv1d, l2norm
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.specs import kimi_delta_attention_spec
from tests.kda.oracle import recurrent_kda

HAS_KDA = hasattr(package, "KimiDeltaAttention")


def rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    use_gate_in_kernel: bool,
    **_,
):
    """In the place of ``chunk_kda``, whose kernel makes the log-decay too."""
    assert use_gate_in_kernel
    wide = torch.promote_types(g.dtype, torch.float32)
    raw = g.to(wide) + dt_bias.view(g.shape[2:])
    rate = A_log.to(wide).exp()[:, None]
    if lower_bound is None:
        decay = -rate * F.softplus(raw)
    else:
        decay = lower_bound * (rate * raw).sigmoid()
    documents = None
    if cu_seqlens is not None:
        documents = Documents.from_cu_seqlens(cu_seqlens, q.shape[1], device=q.device)
    return recurrent_kda(RuleInputs(q, k, v, decay, beta.to(wide)), documents)


def conv(x, weight, bias, activation, cu_seqlens, **_):
    """In the place of fla's ``causal_conv1d``."""
    return causal_conv1d(x, weight, bias, activation, cu_seqlens=cu_seqlens)


@contextmanager
def without_kernels():
    kda = package.kda
    with (
        patch.object(kda, "chunk_kda", rule),
        patch.object(kda, "causal_conv1d", conv),
        patch.object(package.common, "l2norm", l2norm),
        patch.object(kda, "HAVE_FLA", True),
        patch.object(kda, "HAVE_FLA_KDA", True),
        patch.object(package.common, "HAVE_FLA", True),
    ):
        yield


def spec_of_megatrons() -> ModuleSpec:
    """Megatron's class with linears of torch."""
    parts = kimi_delta_attention_spec("local").submodules
    named = vars(parts) | {"beta_proj": parts.in_proj}
    known = package.KimiDeltaAttentionSubmodules.__dataclass_fields__
    submodules = package.KimiDeltaAttentionSubmodules(
        **{name: part for name, part in named.items() if name in known}
    )
    return ModuleSpec(module=package.KimiDeltaAttention, submodules=submodules)


def megatrons(config, groups, **options) -> nn.Module:
    """Megatron's layer; to be called under `without_kernels`."""
    return build_module(
        spec_of_megatrons(), config, layer_number=1, pg_collection=groups, **options
    )
