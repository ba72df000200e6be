"""The rules of Gated DeltaNet-2: the delta rule with one gate for erasing and one for
writing.

    S_t = (I - k_t (b_t * k_t)^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T
    o_t = S_t^T q_t / sqrt(K)

fla's kernels need equal numbers of key and value heads, so each key head's tensors are
repeated for its value heads. The front sums the gradients of a key head's copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.delta_rule.chunk_math import ChunkValues
from ..ops.delta_rule.fla import CHANNEL_RULE_FUNCTIONS, FlaChannelRule
from ..ops.delta_rule.plain import PlainRule
from ..ops.documents import Documents
from ..ops.rules.base import Bits, RuleBackward, RuleForward, SavedForBackward
from ..ops.rules.choice import Choice, choose
from ..ops.rules.fla import BOUNDARY_ARGUMENTS, tested_on_h200
from ..ops.state_maps.state_map import StateShape


class GDN2Inputs(NamedTuple):
    """The rule's inputs or their gradients; gradients of q, k, g, b may have H heads,
    not G."""

    q: Tensor  # [B, S, G, K], unit length
    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, H, V]
    g: Tensor  # [B, S, G, K] fp32, log-decay
    b: Tensor  # [B, S, G, K], the erase gate, a factor on the erase key
    w: Tensor  # [B, S, H, V], the write gate, a factor on the written value


class PlainGDN2(PlainRule):
    """The chunk rule with the erase key ``b * k`` and the written value ``w * v``."""

    backward_reads = frozenset(GDN2Inputs._fields)
    gradients_class = GDN2Inputs

    def values(self, chunks: GDN2Inputs) -> ChunkValues:
        """The values for :func:`.chunk_math.run_group`; ``chunks`` are the inputs'
        chunks ``[n heads, C, ...]``."""
        q, k, v, g, b, w = chunks
        return ChunkValues(self.scaled(q), k, b * k, w * v, g)


class FlaGDN2(FlaChannelRule):
    """fla's kernels of GDN-2, for bf16 or fp16: ``backend="fla"``."""

    backward_reads = frozenset(GDN2Inputs._fields)
    repeatable_setups = (tested_on_h200((128, 128)),)
    fla_functions = {
        **CHANNEL_RULE_FUNCTIONS,
        "fla.ops.gdn2.chunk_fwd chunk_gdn2_fwd_intra": (
            f"q k v gk b w_gate scale {BOUNDARY_ARGUMENTS}"
        ),
        "fla.ops.gdn2.chunk_bwd recompute_w_u_fwd_gdn2": (
            f"q k v b w_gate A gk {BOUNDARY_ARGUMENTS}"
        ),
        "fla.ops.gdn2.chunk_bwd chunk_gdn2_bwd": (
            f"q k v b w_gate Aqk Akk scale initial_state do dht g {BOUNDARY_ARGUMENTS}"
        ),
    }

    # what each names: see `FlaChannelRule`
    chunk_function = "chunk_gdn2_fwd_intra"
    recompute_function = "recompute_w_u_fwd_gdn2"
    backward_function = "chunk_gdn2_bwd"
    gate_arguments = ("b", "w_gate")
    gradients_class = GDN2Inputs

    def begin(self, inputs: GDN2Inputs, documents: Documents | None) -> RuleForward:
        """Begin a forward, in which each value head has a copy of its key head's
        tensors, as fla's kernels require."""
        return super().begin(_repeat_key_heads(inputs), documents)

    def begin_backward(
        self,
        d_o: Tensor,
        inputs: GDN2Inputs,
        saved: SavedForBackward,
        documents: Documents | None,
    ) -> RuleBackward:
        """Begin a backward with the repeated tensors that the forward read."""
        return super().begin_backward(d_o, _repeat_key_heads(inputs), saved, documents)


def _repeat_key_heads(inputs: GDN2Inputs) -> GDN2Inputs:
    """Repeat q, k, g and b ``[B, S, G, K]`` for the value heads. Convert the gates b
    and w, which the front makes in fp32, to the dtype of k and v, as fla's kernels take
    them."""
    k, v = inputs.k, inputs.v
    inputs = inputs._replace(b=inputs.b.to(k.dtype), w=inputs.w.to(v.dtype))
    if k.shape[2] == v.shape[2]:
        return inputs
    repeats = v.shape[2] // k.shape[2]
    names = ("q", "k", "g", "b")
    return inputs._replace(
        **{name: getattr(inputs, name).repeat_interleave(repeats, 2) for name in names}
    )


RULES = FlaGDN2, PlainGDN2  # in the order of preference


def choose_gdn2(
    backend: str,
    state: StateShape,
    device: torch.device,
    dtype: torch.dtype,
    bits: Bits = Bits.FREE,
) -> Choice:
    """Choose the rule of a Gated DeltaNet-2 for heads with this ``state``.

    ``backend`` is ``"fla"``, ``"reference"`` (plain torch) or ``"auto"``: fla if it
    runs here, else the reference.

    ``bits`` is what the rule must promise (:class:`..ops.rules.base.Bits`).

    Raises:
        ValueError: an unknown backend, or a backend that does not support these heads,
            this dtype, this device or ``bits``.
        ImportError: the backend's package is missing, too old, or computes wrong
            results here.
    """
    return choose(
        backend,
        "Gated DeltaNet-2",
        RULES,
        device=device,
        dtype=dtype,
        sizes=state,
        bits=bits,
    )
