"""The rules of Gated DeltaNet-2: the delta rule with gates of their own for erasing and writing.

    S_t = (I - k_t (b_t * k_t)^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T
    o_t = S_t^T q_t / sqrt(K)

Legend: B batch, S seq, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.delta_rule.chunk_math import Values
from ..ops.delta_rule.plain import PlainRule
from ..ops.rules.choice import Choice, choose
from ..ops.state_maps.state_map import StateShape


class GDN2Inputs(NamedTuple):
    """Inputs of the rule, or their gradients. Those of q and k may have H heads, see RuleGrads."""

    q: Tensor  # [B, S, G, K], unit length
    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, H, V]
    g: Tensor  # [B, S, G, K] fp32, log-decay
    b: Tensor  # [B, S, G, K], how much of what is stored for the key is erased
    w: Tensor  # [B, S, H, V], how much of the value is written


class PlainGDN2(PlainRule):
    """The chunk rule with the erase key ``b * k`` and the written value ``w * v``."""

    reads_again = frozenset(GDN2Inputs._fields)
    grads = GDN2Inputs

    def values(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Values:
        scale = k.shape[-1] ** -0.5 if self.scale is None else self.scale
        return Values(q * scale, k, b * k, w * v, g)


def choose_gdn2(
    backend: str,
    state: StateShape,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    *,
    aligned: bool = False,
) -> Choice:
    """The rule of a Gated DeltaNet-2, from dtype, device and installed packages alone.

    Args:
        backend: ``"reference"`` (plain torch) or ``"auto"``.
        deterministic, aligned: see :func:`..ops.rules.choice.choose`, which has the errors too.
    """
    return choose(
        backend, "Gated DeltaNet-2", {}, PlainGDN2,
        device=device, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip
