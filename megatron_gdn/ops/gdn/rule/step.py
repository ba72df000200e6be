"""The gated delta rule one token after the other, for decode steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...documents import Documents
from ...rules.token_rule import TokenRule
from .recurrent import recurrent_gated_delta_rule


class RecurrentRule(TokenRule):
    """The definition itself, in plain torch: elementwise products and sums over a state's rows."""

    def tokens(
        self, inputs: Any, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Any]:
        q, k, v, g, beta = inputs
        return recurrent_gated_delta_rule(q, k, v, g, beta, initial, True, cu_seqlens=documents)
