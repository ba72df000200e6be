"""What tools look up on megatron-core's layer by name: the steps of its forward, one by one.

The forward of :class:`megatron_gdn.GatedDeltaNet` calls none of them; they compute what it does.

Legend: S tokens, B batch, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from .ops import (
    decay_and_write_gates,
    gated_delta_rule,
    l2norm,
    torch_chunk_gated_delta_rule,
)
from .out_norm import apply_gated_norm, summing_group

if TYPE_CHECKING:
    from .layer import GatedDeltaNet


class UpstreamNames:
    """Mixin of the layer, with the names of ``megatron.core.ssm.gated_delta_net``."""

    @property
    def gated_delta_rule(self: GatedDeltaNet) -> Callable:
        """The rule under upstream's name and signature, for tools that look it up on the layer."""
        if self.backend == "reference":
            return torch_chunk_gated_delta_rule
        return partial(gated_delta_rule, backend=self.backend)

    def _apply_gated_norm(self: GatedDeltaNet, x: Tensor, gate: Tensor) -> Tensor:
        """``out_norm(x) * SiLU(gate)`` in ``x.dtype``, the product taken in fp32."""
        return apply_gated_norm(self.out_norm, x, gate, summing_group(self))

    def _prepare_qkv_for_gated_delta_rule(
        self: GatedDeltaNet,
        qkv: Tensor,
        gate: Tensor,
        beta: Tensor,
        alpha: Tensor,
        batch: int,
        seq_len: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Cut convolved rows into heads and normalise query and key; for tools, not the forward.

        Returns:
            query and key ``[B, S, G, K]`` (not repeated for the value heads that share them),
            value and gate ``[B, S, H, V]``, beta and alpha ``[B, S, H]``.
        """
        dims = self.dims.shard(self.dims.layout.conv_width // qkv.shape[-1])
        q, k, v = qkv.split(dims.layout.conv_widths, dim=-1)
        q, k = (x.reshape(batch, seq_len, -1, self.key_head_dim) for x in (q, k))
        if self.use_qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        v, gate = (x.reshape(batch, seq_len, -1, self.value_head_dim) for x in (v, gate))
        return q, k, v, gate, beta, alpha

    def _compute_g_and_beta(
        self: GatedDeltaNet,
        A_log_local_cp: Tensor,
        dt_bias_local_cp: Tensor,
        alpha: Tensor,
        beta: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Likewise log-decay and write strength: ``megatron_gdn.ops.decay_and_write_gates``."""
        return decay_and_write_gates(alpha, beta, A_log_local_cp, dt_bias_local_cp)
