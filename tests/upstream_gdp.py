"""Megatron main's own Gated DeltaProduct on the CPU: stand-ins for kernels of other
packages, and its rule token by token."""

from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_gdn.ops import causal_conv1d, l2norm
from tests.upstream_mamba import PlainGatedNorm

MODULE = "megatron.core.ssm.gated_delta_product"
HAS_GDP = find_spec(MODULE) is not None


def rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_,
) -> tuple[Tensor, Tensor | None]:
    """In the place of fla's ``chunk_gated_delta_product``."""
    assert initial_state is None
    n = num_householder
    kind = q.dtype
    q, k, v, beta = (x.to(g.dtype) for x in (q, k, v, beta))
    ends = [q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()[1:]
    outputs = []
    S = None
    for start, end in pairwise([0, *ends]):
        S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        for t in range(start, end):
            S = g[:, t].exp()[..., None, None] * S
            for j in range(t * n, (t + 1) * n):
                read = torch.einsum("bhkv,bhk->bhv", S, k[:, j])
                write = beta[:, j, :, None] * (v[:, j] - read)
                S = S + torch.einsum("bhk,bhv->bhkv", k[:, j], write)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    o = torch.stack(outputs, dim=1) * q.shape[3] ** -0.5
    return o.to(kind), S if output_final_state else None


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """In the place of ``causal_conv1d_fn``, which takes ``[B, C, S]``."""
    offsets = None
    if seq_idx is not None:
        changes = seq_idx[0].diff().nonzero().flatten() + 1
        offsets = [0, *changes.tolist(), seq_idx.shape[1]]
    rows = x.transpose(1, 2)
    y, _ = causal_conv1d(rows, weight, bias, activation, cu_seqlens=offsets)
    return y.transpose(1, 2)


class PlainNorm(PlainGatedNorm):
    """In the place of ``ExtendedRMSNorm``, which takes Megatron's own groups."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )


@contextmanager
def without_kernels():
    package = import_module(MODULE)
    stand_ins = {
        "HAVE_MAMBA_SSM": True,
        "HAVE_FLA": True,
        "ExtendedRMSNorm": PlainNorm,
        "chunk_gated_delta_product": rule,
        "causal_conv1d_fn": conv,
        "l2_norm": l2norm,
        "check_fla_sequence_packing_support": lambda: (True, None),
        "assert_causal_conv1d_deterministic": lambda *_: None,
    }
    with ExitStack() as patched:
        for name, stand_in in stand_ins.items():
            patched.enter_context(patch.object(package, name, stand_in, create=True))
        yield


def megatrons_class() -> type[nn.Module]:
    return import_module(MODULE).GatedDeltaProductMixer


def megatrons(config, groups, **options) -> nn.Module:
    """Megatron's class with linears of torch; to be called under `without_kernels`."""
    package = import_module(MODULE)
    parts = package.GatedDeltaProductMixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
    )
    return megatrons_class()(
        config,
        parts,
        config.hidden_size,
        layer_number=1,
        pg_collection=groups,
        **options,
    )
