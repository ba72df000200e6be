"""The gated delta rule token by token, in plain torch; see :mod:`..ops.rules.token_rule`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleInputs, check_rule_inputs
from ..ops.documents import Documents
from ..ops.elementwise import l2norm
from ..ops.rules.token_rule import TokenRule, recurrence


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One token at a time, in fp32 (fp64 when ``value`` is fp64); slow, and the oracle.

    Args, returns and errors: as :func:`megatron_gdn.ops.gated_delta_rule`.
    """
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    if use_qk_l2norm_in_kernel:
        query, key = l2norm(query), l2norm(key)
    wide = torch.promote_types(value.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in (query, key, value, g, beta))
    q = q * (key.shape[-1] ** -0.5 if scale is None else scale)
    offsets = None if documents is None else documents.offsets
    o, final = recurrence(q, k, v, g, beta, initial_state, offsets)
    return o.to(value.dtype), final if output_final_state else None


class RecurrentRule(TokenRule):
    def tokens(
        self, inputs: RuleInputs, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Any]:
        return recurrent_gated_delta_rule(*inputs, initial, True, cu_seqlens=documents)
