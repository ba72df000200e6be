"""Runs delta rules by fla's kernels, with a decay per head or per channel.

A chunk that starts with state S ends with the decayed S plus ``k^T (u - w S)``. Here
``k`` are the keys, decayed to the chunk's end; ``u`` is what the chunk would write from
a zero state, and ``w S`` what the state changes in it. Each subclass computes w and u by
kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..documents import Documents, documents_of_rows
from ..kernels.tiles import MOST_PROGRAMS
from ..rules.base import Gradients, Inputs
from ..rules.fla import SEQUENCES, ChunkProducts, FlaBackward, FlaForward, FlaRule
from ..state_maps.segments import (
    CHUNK,
    Segments,
    compose,
    cut_by_length,
    one_segment_per_sequence,
)
from ..state_maps.state_map import StateMap
from .base import RuleGrads

STATE_KERNELS = {
    "fla.ops.utils chunk_local_cumsum": f"g chunk_size scale {SEQUENCES}",
    "fla.ops.common.chunk_delta_h chunk_gated_delta_rule_fwd_h": (
        f"k w u g gk initial_state output_final_state {SEQUENCES}"
    ),
    "fla.ops.common.chunk_delta_h chunk_gated_delta_rule_bwd_dhu": (
        f"q k w do dv g gk h0 dht scale {SEQUENCES}"
    ),
    "fla.ops.cp.chunk_fwd chunk_cp_fwd_h": (
        "k w u hm g gk cu_seqlens chunk_size multi_seqs"
    ),
}
CHANNEL_RULE_KERNELS = {
    **STATE_KERNELS,
    "fla.ops.gla.chunk chunk_gla_fwd_o_gk": f"q v g A h scale {SEQUENCES}",
    "fla.ops.kda.chunk_bwd chunk_kda_bwd_dAv": f"q k v do A scale {SEQUENCES}",
}


class FlaDeltaRule(FlaRule):
    """fla's delta rule; :meth:`chunk_products` returns k, w, u and the sums of g, as
    ``g``, or ``gk`` if g has a value per channel."""

    # Each subclass has this method. It returns arguments of a backward kernel: q, k, w,
    # the sums of g, and dv, the share of the written values' gradient that comes from
    # d_o of the same chunk.
    readers: Callable[..., dict[str, Tensor]]

    def sums(self, x: FlaForward | FlaBackward) -> Tensor:
        """The sums of g from each chunk's start, in fp32, divided by ln 2 since fla
        uses exp2."""
        return self.fla.chunk_local_cumsum(
            x.inputs.g, chunk_size=CHUNK, scale=self.fla.RCP_LN2, **x.at
        )

    def walk(
        self,
        x: FlaForward,
        products: ChunkProducts,
        initial: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.fla.chunk_gated_delta_rule_fwd_h(
            **products.chunks, initial_state=initial, output_final_state=final, **x.at
        )

    def state_map(self, x: FlaForward, products: ChunkProducts) -> StateMap:
        segments = segments_of(x.inputs, x.documents)
        u = products.chunks["u"]
        if len(segments.offsets) > MOST_PROGRAMS:
            raise ValueError(
                f"{len(segments.offsets) - 1} pieces of sequences: fla's kernel of state "
                f"maps takes at most {MOST_PROGRAMS - 1}. Pack fewer documents, or use "
                "backend='reference'."
            )
        # fla's kernel for context parallelism makes the state maps [local | through] of
        # all segments.
        H, V = u.shape[2:]
        K = products.chunks["k"].shape[-1]
        P = len(segments.offsets) - 1
        maps = u.new_empty(P, H, K, V + K, dtype=torch.float32)
        rows = {
            name: of_rows.flatten(0, 1)[None]
            for name, of_rows in products.chunks.items()
        }
        self.fla.chunk_cp_fwd_h(
            **rows,
            hm=maps,
            cu_seqlens=segments.offsets,
            chunk_size=CHUNK,
            multi_seqs=True,
        )
        local, through = (of.contiguous() for of in maps.split([V, K], dim=-1))
        return compose(local, through, segments)

    def d_states(self, x: FlaBackward, any_states: Tensor) -> Tensor:
        _, d_local, _ = self.fla.chunk_gated_delta_rule_bwd_dhu(
            **self.readers(x),
            do=x.d_o,
            h0=any_states,
            dht=None,
            scale=x.inputs.k.shape[-1] ** -0.5,
            **x.at,
        )
        return d_local


class FlaChannelRule(FlaDeltaRule):
    """A delta rule with a decay per channel. A forward saves Aqk, the chunks' products
    of q and k, and Akk, the inverses of the chunks' linear systems.

    The backward computes the sums of g again, since they are as large as q, k and v
    together. A subclass names fla's functions ``within``, ``recompute_within`` and
    ``backward_within``.
    """

    # name of fla's function for w, u, an unused item, k, Aqk, Akk
    within: ClassVar[str]
    # name of fla's function that computes w, u, q, k from Akk
    recompute_within: ClassVar[str]
    backward_within: ClassVar[str]  # name of fla's function that computes all gradients
    # fla's argument names for the rule's inputs after g
    gates: ClassVar[tuple[str, ...]]
    grads: ClassVar[Callable[..., Gradients]] = RuleGrads
    settings: dict[str, object] = {}  # noqa: RUF012  further arguments, which a subclass sets

    def call(
        self, function: str, x: FlaForward | FlaBackward, **others: object
    ) -> tuple[Tensor, ...]:
        q, k, v, _, *gates = x.inputs
        named = dict(zip(self.gates, gates, strict=True))
        return getattr(self.fla, function)(q=q, k=k, v=v, **named, **others, **x.at)

    def chunk_products(self, x: FlaForward) -> ChunkProducts:
        g_sum = self.sums(x)
        scale = x.inputs.k.shape[-1] ** -0.5
        w, u, _, k, Aqk, Akk = self.call(
            self.within, x, gk=g_sum, scale=scale, **self.settings
        )
        return ChunkProducts({"k": k, "w": w, "u": u, "gk": g_sum}, (Aqk, Akk), Aqk)

    def output(
        self, x: FlaForward, products: ChunkProducts, states: Tensor, written: Tensor
    ) -> Tensor:
        return self.fla.chunk_gla_fwd_o_gk(
            q=x.inputs.q,
            v=written,
            g=products.chunks["gk"],
            A=products.scores,
            h=states,
            scale=x.inputs.k.shape[-1] ** -0.5,
            **x.at,
        )

    def kept_for_backward(self, x: FlaBackward) -> tuple[Tensor, ...]:
        return self.sums(x), *x.saved.tensors

    def readers(self, x: FlaBackward) -> dict[str, Tensor]:
        g_sum, Aqk, Akk = x.kept
        w, u, q, k = self.call(self.recompute_within, x, gk=g_sum, A=Akk)
        _, dv = self.fla.chunk_kda_bwd_dAv(
            q=x.inputs.q,
            k=x.inputs.k,
            v=u,
            A=Aqk,
            do=x.d_o,
            scale=x.inputs.k.shape[-1] ** -0.5,
            **x.at,
        )
        return {"q": q, "k": k, "w": w, "gk": g_sum, "dv": dv}

    def gradients(
        self, x: FlaBackward, initial: Tensor | None, d_final: Tensor | None
    ) -> Gradients:
        g_sum, Aqk, Akk = x.kept
        dq, dk, dv, *others = self.call(
            self.backward_within,
            x,
            Aqk=Aqk,
            Akk=Akk,
            scale=x.inputs.k.shape[-1] ** -0.5,
            initial_state=initial,
            do=x.d_o,
            dht=d_final,
            g=g_sum,
            **self.settings,
        )
        d_gates = others[: len(self.gates)]
        dg = others[len(self.gates)]
        return self.grads(dq, dk, dv, dg, *d_gates)


def segments_of(inputs: Inputs, documents: Documents | None) -> Segments:
    """Cut sequences into segments so short that fla's state-map kernel can index them in
    32 bits."""
    rows, tokens, H, V = inputs.v.shape
    K = inputs.k.shape[-1]
    longest = 2**31 // (H * max(K, V)) // CHUNK * CHUNK
    if documents is None:
        documents = documents_of_rows((rows, tokens), inputs.v.device)
    if documents.known_on_host:
        return Segments.of(documents, cut_by_length, H, longest)
    if tokens > longest:
        raise NotImplementedError(
            f"backend='fla' with {H} value heads and initial states takes documents in "
            f"fixed buffers of at most {longest} tokens per rank, not {tokens}; use "
            "backend='flash_qla' or linear_cp_mode='headwise'."
        )
    return Segments.of(documents, one_segment_per_sequence)
