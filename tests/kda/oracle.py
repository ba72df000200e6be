"""Kimi Delta Attention's recurrence, one token after the other."""

import torch
from torch import Tensor

from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.rules.base import in_one_row, in_rows
from megatron_gdn.ops.rules.token_rule import recurrence


def recurrent_kda(
    inputs: RuleInputs,
    documents: Documents | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token by token, in fp32 (fp64 for fp64); see ``ops/rules/token_rule.py``.

    ``documents``: all batch rows end to end; None when a row is one sequence.
    """
    rows = inputs.v.shape[:2]
    dtype = inputs.v.dtype
    offsets = None if documents is None else documents.filled_offsets
    inputs = inputs if documents is None else in_one_row(inputs)
    q, k, v, g, beta = (x.to(torch.promote_types(dtype, torch.float32)) for x in inputs)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    o, final = recurrence(q * k.shape[-1] ** -0.5, k, v, g, beta, initial, offsets)
    return in_rows(o.to(dtype), rows), final
