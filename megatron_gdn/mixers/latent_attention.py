"""Multi-head latent attention without position embedding, for the '+' layers of Kimi
Linear.

Legend: s tokens of this rank, B batch, H heads of this tensor-parallel rank, D columns
of a head's query, V columns of a head's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn


class LatentAttention(MLASelfAttention):
    """Megatron's multi-head latent attention, but no column of q and k is rotated::

        c, r = kv_down(x)                     kv_lora_rank, qk_pos_emb_head_dim
        k, v = kv_up(RMSNorm(c))              per head
        q    = q_proj(x) or, with q_lora_rank, q_up(RMSNorm(q_down(x)))
        y    = proj(softmax(q [k | r]^T / sqrt(D)) v)         causal; all heads share r

    (Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.)

    Args:
        config: an ``MLATransformerConfig``. Of its fields about rotation only
            ``mscale_all_dim`` has an effect: as in Megatron, it scales the scores.
        submodules: as in Megatron; ``q_layernorm`` is left out without
            ``config.q_lora_rank``. A norm must not be fused into a projection.
        norm_epsilon: epsilon of the two norms; None means
            ``config.layernorm_epsilon``.

    The other arguments are those of ``MLASelfAttention``.

    Raises:
        NotImplementedError: ``config.cache_mla_latents`` or
            ``config.apply_rope_fusion``, or generation with a context-parallel size
            above 1.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        *args: Any,
        norm_epsilon: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Build Megatron's layer without rotation.

        ``norm_epsilon`` is the epsilon of the two norms; None: the config's.
        """
        if config.cache_mla_latents:
            raise NotImplementedError(
                "cache_mla_latents=True: generation from cached latents rotates "
                "queries and keys, and LatentAttention has no position embedding. Set "
                "it to False."
            )
        if config.apply_rope_fusion:
            raise NotImplementedError(
                "apply_rope_fusion=True: Megatron's fused kernels rotate queries and "
                "keys, and LatentAttention has no position embedding. Set it to False "
                "(--no-rope-fusion)."
            )
        kv_norm = _with_epsilon(submodules.kv_layernorm, norm_epsilon)
        q_norm: Any = IdentityOp
        if config.q_lora_rank is not None:
            q_norm = _with_epsilon(submodules.q_layernorm, norm_epsilon)
        submodules = replace(submodules, q_layernorm=q_norm, kv_layernorm=kv_norm)
        super().__init__(config, submodules, *args, **kwargs)
        self.norm_epsilon = norm_epsilon
        self.rotary_pos_emb: Any = _NoAngles(config)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Megatron calls this method to choose the projections and norms to build. The
        result is those of the spec; Megatron's own method would fuse a norm into
        linear_q_proj."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        norms = ("q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names + norms}

    def forward(
        self, *args: Any, inference_context: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, B, hidden] -> [s, B, hidden]`` and the output bias, as Megatron's."""
        ranks = self.pg_collection.cp.size()
        if inference_context is not None and ranks > 1:
            raise NotImplementedError(
                f"LatentAttention was built with context_parallel_size={ranks}, and "
                "generates on one context-parallel rank. Generate with a model built "
                "with context_parallel_size=1."
            )
        keywords: Any = {"inference_context": inference_context, **kwargs}
        output_and_bias: Any = super().forward(*args, **keywords)
        return output_and_bias

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The input of q's projection, as in Megatron, and the rows ``c | r`` of this
        rank's tokens.

        Every tensor-parallel rank uses r for its own heads, so r's gradient must be
        summed over the ranks. Megatron's own code leaves this sum out, except under
        sequence parallelism if kv_down has its whole weight on every rank.
        """
        rows, latent = super()._qkv_down_projection(hidden_states)
        group = self.pg_collection.tp
        if group.size() == 1:
            return rows, latent
        widths = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        is_column_share = latent.shape[-1] != sum(widths)
        if is_column_share:
            latent = gather_from_tensor_model_parallel_region(latent, group)
        if self.config.sequence_parallel:
            # Megatron's next code gathers the tokens of r, so its backward sums r's
            # gradient.
            if is_column_share:
                latent = scatter_to_sequence_parallel_region(latent, group)
            return rows, latent
        c, r = latent.split(widths, dim=-1)
        r = copy_to_tensor_model_parallel_region(r, group)
        return rows, torch.cat([c, r], dim=-1)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        *others: Any,
        **by_name: Any,
    ):
        """Megatron's q, k ``[s, B, H, D]`` and v ``[s, B, H, V]``; B is left out for
        packed documents.

        Megatron's method reads ``packed_seq_params`` only to rotate q and k. This layer
        rotates nothing, so Megatron's method gets None.
        """
        tensors: Any = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, None, *others, **by_name
        )
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            return tensors
        return tuple(tensor.squeeze(1) for tensor in tensors)


class _NoAngles(nn.Module):
    """Stands in for the rotary embedding that Megatron takes for ``config.rope_type``:
    a table of angles ``[rows, 1, 1, 0]``, so that no column is rotated."""

    def __init__(self, config: MLATransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer(
            "angles", torch.empty(1, 1, 1, 0, dtype=torch.float32), persistent=False
        )

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: Any,
        *others: Any,
    ) -> int:
        """The number of rows of the table, at least the number of tokens.

        Megatron's method, with its arguments: ``transformer_input`` is
        ``[s, B, hidden]``; ``transformer`` is not read.
        """
        if inference_context is not None:
            return inference_context.max_sequence_length
        tokens = transformer_input.shape[0]
        if transformer_config.sequence_parallel:
            tokens *= transformer_config.tensor_model_parallel_size
        return tokens

    def forward(self, rows: int, **others: Any) -> Tensor | tuple[Tensor, float]:
        """The table; for YaRN, Megatron's default, also the factor of its cosines."""
        angles = self.get_buffer("angles").expand(rows, 1, 1, 0)
        if self.config.rope_type == "rope":
            return angles
        return angles, 1.0


def _with_epsilon(norm: Any, epsilon: float | None) -> Callable[..., nn.Module]:
    """A function that builds ``norm`` with ``epsilon``; None: with the epsilon that
    Megatron gives."""

    def build(config: Any, hidden_size: int, eps: float) -> nn.Module:
        """Build the norm over ``hidden_size`` columns; ``epsilon`` replaces ``eps``."""
        if epsilon is not None:
            eps = epsilon
        return norm(config=config, hidden_size=hidden_size, eps=eps)

    return build
