"""The layers between their projections: which :class:`.step.RowMixer` each is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..module_hooks import run_pre_hooks, wait_for_parameters
from ..ops.mixer import GatedNorm
from ..out_norm import apply_gated_norm, is_plain_rms_norm, read_norm
from .gdn import gdn_rows
from .mamba2 import mamba2_rows
from .step import RowMixer

if TYPE_CHECKING:
    from ..layer import GatedDeltaNet
    from ..mamba2 import Mamba2Mixer


def rows_of_gdn(layer: GatedDeltaNet, proj: Tensor) -> RowMixer:
    """A Gated DeltaNet, for the rows ``proj`` ``[s, B, P]``; pre-hooks of its conv1d run."""
    conv, columns = layer.conv1d, layer.dims.layout.conv_columns
    run_pre_hooks(conv, lambda: proj[..., columns].permute(1, 2, 0))

    def call_norm(o: Tensor, rows: Tensor) -> Tensor:
        z = rows[..., layer.dims.layout.columns("z")].unflatten(-1, o.shape[2:]).transpose(0, 1)
        y = apply_gated_norm(layer.out_norm, o.to(rows.dtype), z)
        return y.flatten(2).transpose(0, 1).contiguous()

    plain = is_plain_rms_norm(layer.out_norm)
    return gdn_rows(
        proj, conv.weight, conv.bias, layer.A_log, layer.dt_bias, layer.dims.heads,
        rule=layer.micro_batches.rule_for(proj.device, proj.dtype),
        norm=read_norm(layer.out_norm, None) if plain else call_norm,
        normalise_qk=layer.use_qk_l2norm,
    )  # fmt: skip


def rows_of_mamba2(layer: Mamba2Mixer, proj: Tensor) -> RowMixer:
    """A Mamba2 mixer, for the rows ``proj`` ``[s, B, P]``."""
    norm = None
    if layer.rmsnorm:
        wait_for_parameters(layer.norm)
        norm = GatedNorm(layer.norm.weight, layer.norm.eps)
    return mamba2_rows(
        proj, layer.conv1d_weight, layer.conv1d_bias, layer.A_log, layer.dt_bias, layer.D,
        layer.layout,
        rule=layer.micro_batches.rule_for(proj.device, proj.dtype),
        norm=norm,
        dt_limit=layer.dt_limit,
    )  # fmt: skip
