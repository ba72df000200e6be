"""The attributes and methods of megatron-core's layer that Megatron and tools look up
by name.

The forward of :class:`megatron_gdn.GatedDeltaNet` calls none of these methods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ..mixers.base import RecurrentMixer
from ..mixers.out_norm import apply_gated_norm
from ..ops.elementwise import l2norm
from ..ops.front.gates import decay_and_write_gates
from .api import gated_delta_rule, torch_chunk_gated_delta_rule
from .sizes import GDNDims


class UpstreamNames(RecurrentMixer):
    """A mixer with the attribute and method names of
    ``megatron.core.ssm.gated_delta_net``."""

    global_dims: GDNDims
    dims: GDNDims
    use_qk_l2norm: bool
    allow_neg_eigval: bool

    def _set_size_attributes(self) -> None:
        """Set sizes under megatron-core's names; ``*_local_tp``: on one tensor-parallel
        rank."""
        all_ranks = self.global_dims
        local = self.dims
        if self.config.sequence_parallel:
            self.sp_size = self.tp_size
        else:
            self.sp_size = 1
        self.hidden_size = all_ranks.hidden_size
        self.conv_kernel_dim = all_ranks.conv_kernel_dim
        self.num_key_heads = all_ranks.num_key_heads
        self.num_value_heads = all_ranks.num_value_heads
        self.key_head_dim = all_ranks.key_head_dim
        self.value_head_dim = all_ranks.value_head_dim
        self.qk_dim = all_ranks.qk_dim
        self.v_dim = all_ranks.v_dim
        self.in_proj_dim = all_ranks.layout.width
        self.conv_dim = all_ranks.layout.conv_width
        self.qk_dim_local_tp = local.qk_dim
        self.v_dim_local_tp = local.v_dim
        self.conv_dim_local_tp = local.layout.conv_width
        self.num_v_heads_local_tp = local.num_value_heads
        # The widths of qkv, z, beta and alpha on a context-parallel rank after a head
        # exchange.
        widths = (
            self.conv_dim_local_tp,
            self.v_dim_local_tp,
            local.num_value_heads,
            local.num_value_heads,
        )
        self.feat_dim_split = tuple(n // self.cp_size for n in widths)
        self.in_proj_split_sections = local.layout.widths

    @property
    def act_fn(self) -> Callable[[Tensor], Tensor]:
        """The activation of the convolution; ``output_gate_activation`` names the
        gate's."""
        return F.silu

    @property
    def activation(self) -> str:
        """The name of the convolution's activation."""
        return "silu"

    # Megatron-Bridge calls this method after it has changed process groups
    _setup_variant_attrs = _set_size_attributes

    @property
    def gated_delta_rule(self) -> Callable:
        """The delta rule under megatron-core's name and signature."""
        if self.backend == "reference":
            return torch_chunk_gated_delta_rule
        return partial(gated_delta_rule, backend=self.backend)

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """``out_norm(x) * act(gate)``, multiplied in fp32 and returned in
        ``x.dtype``."""
        activation = self.output_gate_activation
        return apply_gated_norm(self.out_norm, x, gate, self.norm_group, activation)

    def _prepare_input_for_gated_delta_rule(
        self, qkv: Tensor, gate: Tensor, batch: int, seq_len: int, *gates: Tensor
    ) -> tuple[Tensor, ...]:
        """Return q and k of unit length, repeated for every value head, then v, then
        ``gate`` and ``gates`` unchanged. q and k are ``[batch, seq_len, H, K]``, v has
        V columns.

        ``qkv`` is ``[batch, seq_len, C]``, with C columns of this tensor-parallel rank,
        or of one rank after a head exchange.
        """
        dims = self.dims.shard(self.dims.layout.conv_width // qkv.shape[-1])
        q, k, v = qkv.split(dims.layout.conv_widths, dim=-1)
        q, k = (x.reshape(batch, seq_len, -1, self.key_head_dim) for x in (q, k))
        v = v.reshape(batch, seq_len, -1, self.value_head_dim)
        if self.use_qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        return tuple(x.contiguous() for x in (q, k, v, gate, *gates))

    def _prepare_qkv_for_gated_delta_rule(
        self,
        qkv: Tensor,
        gate: Tensor,
        beta: Tensor,
        alpha: Tensor,
        batch: int,
        seq_len: int,
    ) -> tuple[Tensor, ...]:
        """`_prepare_input_for_gated_delta_rule` as megatron-core before 0.19 calls it:
        under this name, with the arguments in this order."""
        gate = gate.reshape(batch, seq_len, -1, self.value_head_dim)
        return self._prepare_input_for_gated_delta_rule(
            qkv, gate, batch, seq_len, beta, alpha
        )

    def _compute_g_and_beta(
        self,
        A_log_local_cp: Tensor,
        dt_bias_local_cp: Tensor,
        alpha: Tensor,
        beta: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-decay and write strength, fp32, from the sections ``alpha`` and ``beta``;
        ``*_local_cp`` are the parameters of this rank's heads."""
        return decay_and_write_gates(
            alpha,
            beta,
            A_log_local_cp,
            dt_bias_local_cp,
            allow_neg_eigval=self.allow_neg_eigval,
        )
