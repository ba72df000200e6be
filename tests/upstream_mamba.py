"""megatron-core's own MambaMixer on the CPU: two stand-ins for mamba-ssm's pieces."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from tests.mamba2.oracle import SSDInputs, token_by_token


class PlainGatedNorm(nn.Module):
    """In the place of ``ExtendedRMSNorm``."""

    def __init__(self, size, eps, group_size, norm_before_gate, device, dtype) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps = eps
        self.group_size = group_size
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, y, z):
        y = (y * F.silu(z)).unflatten(-1, (-1, self.group_size))
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return y.flatten(-2) * self.weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def scan(
    x, dt, A, B, C, chunk_size, *, D, z, dt_bias, dt_softplus, return_final_states, **_
):
    """In the place of ``mamba_chunk_scan_combined``."""
    assert dt_softplus and z is None and not return_final_states
    dt = F.softplus(dt + dt_bias)
    skip = D[:, None].expand(*dt.shape, 1)
    inputs = SSDInputs(x, B, C, dt, A * dt, skip)
    return token_by_token(inputs, (x.shape[1],) * x.shape[0])[0].to(x.dtype)


@contextmanager
def without_mamba_ssm():
    with (
        patch.object(mamba_mixer, "HAVE_MAMBA_SSM", True),
        patch.object(mamba_mixer, "ExtendedRMSNorm", PlainGatedNorm),
        patch.object(mamba_mixer, "mamba_chunk_scan_combined", scan),
    ):
        yield


def megatron_mixer(config, submodules, groups) -> nn.Module:
    """``config.use_mamba_mem_eff_path`` must be off; to be called under
    `without_mamba_ssm`."""
    return mamba_mixer.MambaMixer(
        config, submodules, config.hidden_size, pg_collection=groups, layer_number=1
    )
