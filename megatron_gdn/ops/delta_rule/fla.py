"""Delta rules in fla's kernels, with a decay per head or per channel.

    S_next = decayed S + k^T (u - w S)

S is the state before a chunk, and S_next the state after it. k are the keys, decayed to
the chunk's end. u are the values that the chunk writes if S is zero, and ``u - w S``
the values that it writes for any S. Each subclass computes w and u by its own kernels.
The argument ``call`` of a method is a forward or a backward, with its ``inputs`` and
fla's arguments for the ``boundaries``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..documents import Documents, documents_of_rows
from ..kernels.tiles import MOST_PROGRAMS
from ..rules.base import Gradients, Inputs
from ..rules.fla import (
    BOUNDARY_ARGUMENTS,
    ChunkProducts,
    FlaBackward,
    FlaForward,
    FlaRule,
)
from ..state_maps.segments import (
    CHUNK,
    Segments,
    compose,
    cut_by_length,
    one_segment_per_sequence,
)
from ..state_maps.state_map import StateMap
from .base import RuleGrads

# fla's functions that every delta rule calls, as :attr:`FlaRule.fla_functions`
DELTA_RULE_FUNCTIONS = {
    "fla.ops.utils chunk_local_cumsum": f"g chunk_size scale {BOUNDARY_ARGUMENTS}",
    "fla.ops.common.chunk_delta_h chunk_gated_delta_rule_fwd_h": (
        f"k w u g gk initial_state output_final_state {BOUNDARY_ARGUMENTS}"
    ),
    "fla.ops.common.chunk_delta_h chunk_gated_delta_rule_bwd_dhu": (
        f"q k w do dv g gk h0 dht scale {BOUNDARY_ARGUMENTS}"
    ),
    "fla.ops.cp.chunk_fwd chunk_cp_fwd_h": (
        "k w u hm g gk cu_seqlens chunk_size multi_seqs"
    ),
}
# the same for delta rules with a decay per channel
CHANNEL_RULE_FUNCTIONS = {
    **DELTA_RULE_FUNCTIONS,
    "fla.ops.gla.chunk chunk_gla_fwd_o_gk": f"q v g A h scale {BOUNDARY_ARGUMENTS}",
    "fla.ops.kda.chunk_bwd chunk_kda_bwd_dAv": f"q k v do A scale {BOUNDARY_ARGUMENTS}",
}


class FlaDeltaRule(FlaRule):
    """fla's delta rule. The ``states_arguments`` of its :class:`ChunkProducts` are k,
    w, u and the sums of g: ``g``, or ``gk`` if g has a value per channel."""

    # A method of each subclass, called with a FlaBackward. It returns arguments for
    # fla's `chunk_gated_delta_rule_bwd_dhu`: q, k, w, the sums of g, and dv. dv is a
    # part of the gradient of ``u - w S``: the part that d_o of the same chunk gives.
    # `d_states` adds the other arguments.
    d_states_arguments: Callable[..., dict[str, Tensor]]

    def decay_sums(self, call: FlaForward | FlaBackward) -> Tensor:
        """The sums of g from each chunk's start, divided by ln 2, in the shape of g.

        fla computes 2^x in place of e^x.
        """
        return self.fla.chunk_local_cumsum(
            call.inputs.g, chunk_size=CHUNK, scale=self.fla.RCP_LN2, **call.boundaries
        )

    def pass_states(
        self,
        call: FlaForward,
        products: ChunkProducts,
        initial: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Pass the states from chunk to chunk, from ``initial`` (None: zeros).

        Returns the states before chunks, the values ``u - w S`` that tokens write to
        the state, and the final states if ``final``. ``products`` has k, w, u and the
        sums of g.
        """
        return self.fla.chunk_gated_delta_rule_fwd_h(
            **products.states_arguments,
            initial_state=initial,
            output_final_state=final,
            **call.boundaries,
        )

    def state_map(self, call: FlaForward, products: ChunkProducts) -> StateMap:
        """The maps ``[N, H, K, .]`` of the sequences, composed of their segments' maps.
        Sequences are cut so that their segments run in parallel."""
        segments = segments_of(call.inputs, call.documents)
        u = products.states_arguments["u"]
        if len(segments.offsets) > MOST_PROGRAMS:
            raise ValueError(
                f"{len(segments.offsets) - 1} pieces of sequences: fla's kernel of "
                f"state maps takes at most {MOST_PROGRAMS - 1}. Pack fewer documents, "
                "or use backend='reference'."
            )
        # fla's kernel for context parallelism writes ``local`` and ``through`` of every
        # segment side by side into ``maps``. It takes one row of tokens [1, B T, ...].
        H, V = u.shape[2:]
        K = products.states_arguments["k"].shape[-1]
        segment_count = len(segments.offsets) - 1
        maps = u.new_empty(segment_count, H, K, V + K, dtype=torch.float32)
        in_one_row = {
            name: x_BT.flatten(0, 1)[None]
            for name, x_BT in products.states_arguments.items()
        }
        self.fla.chunk_cp_fwd_h(
            **in_one_row,
            hm=maps,
            cu_seqlens=segments.offsets,
            chunk_size=CHUNK,
            multi_seqs=True,
        )
        local, through = maps.split([V, K], dim=-1)
        return compose(local.contiguous(), through.contiguous(), segments)

    def d_states(self, call: FlaBackward, any_states: Tensor) -> Tensor:
        """The gradients ``[N, H, K, V]`` of the initial states, with zero gradients of
        the final states. fla returns these gradients only if it gets initial states;
        the values of ``any_states`` are not read."""
        _, d_local, _ = self.fla.chunk_gated_delta_rule_bwd_dhu(
            **self.d_states_arguments(call),
            do=call.d_o,
            h0=any_states,
            dht=None,
            scale=call.inputs.k.shape[-1] ** -0.5,
            **call.boundaries,
        )
        return d_local


class FlaChannelRule(FlaDeltaRule):
    """A delta rule with a decay per channel.

    A forward saves Aqk, the chunks' products of q and k, and Akk, the inverses of the
    chunks' linear systems. It does not save the sums of g, which are as large as q, k
    and v together: the backward computes them again.
    """

    # A subclass gives the names of three functions of fla.
    # computes w, u, an unused item, k, Aqk and Akk
    chunk_function: ClassVar[str]
    # computes w, u, q and k from Akk
    recompute_function: ClassVar[str]
    # computes the gradients of all inputs
    backward_function: ClassVar[str]
    # fla's argument names for the rule's inputs after g
    gate_arguments: ClassVar[tuple[str, ...]]
    # the NamedTuple class in which `gradients` returns the gradients of the inputs
    gradients_class: ClassVar[Callable[..., Gradients]] = RuleGrads
    # further keyword arguments of the calls of chunk_function and backward_function
    chunk_and_backward_arguments: dict[str, object] = {}  # noqa: RUF012

    def call_fla(
        self, function: str, call: FlaForward | FlaBackward, **others: object
    ) -> tuple[Tensor, ...]:
        """Call fla's ``function`` with q, k, v, the gates, ``others`` and the
        boundaries. g is left out, since fla's functions take its sums."""
        q, k, v, _, *gates = call.inputs
        gates_by_name = dict(zip(self.gate_arguments, gates, strict=True))
        return getattr(self.fla, function)(
            q=q, k=k, v=v, **gates_by_name, **others, **call.boundaries
        )

    def chunk_products(self, call: FlaForward) -> ChunkProducts:
        """The products inside each chunk; :meth:`output` reads Aqk, the backward Aqk
        and Akk."""
        g_sum = self.decay_sums(call)
        scale = call.inputs.k.shape[-1] ** -0.5
        w, u, _, k, Aqk, Akk = self.call_fla(
            self.chunk_function,
            call,
            gk=g_sum,
            scale=scale,
            **self.chunk_and_backward_arguments,
        )
        return ChunkProducts({"k": k, "w": w, "u": u, "gk": g_sum}, (Aqk, Akk), Aqk)

    def output(
        self, call: FlaForward, products: ChunkProducts, states: Tensor, written: Tensor
    ) -> Tensor:
        """The output ``[B, S, H, V]`` from the ``states`` before chunks and the values
        ``written`` to the state. ``products`` has Aqk as ``scores``, and the sums of
        g."""
        return self.fla.chunk_gla_fwd_o_gk(
            q=call.inputs.q,
            v=written,
            g=products.states_arguments["gk"],
            A=products.scores,
            h=states,
            scale=call.inputs.k.shape[-1] ** -0.5,
            **call.boundaries,
        )

    def kept_for_backward(self, call: FlaBackward) -> tuple[Tensor, ...]:
        return self.decay_sums(call), *call.saved.tensors

    def d_states_arguments(self, call: FlaBackward) -> dict[str, Tensor]:
        """The arguments q, k, w, gk (the sums of g) and dv of fla's
        ``chunk_gated_delta_rule_bwd_dhu``, for the gradients of the states.

        They are computed from the inputs, Aqk and Akk.
        :meth:`FlaDeltaRule.d_states` calls fla's function, and adds do, h0, dht, scale
        and the boundaries.
        """
        g_sum, Aqk, Akk = call.kept_tensors
        w, u, q, k = self.call_fla(self.recompute_function, call, gk=g_sum, A=Akk)
        _, dv = self.fla.chunk_kda_bwd_dAv(
            q=call.inputs.q,
            k=call.inputs.k,
            v=u,
            A=Aqk,
            do=call.d_o,
            scale=call.inputs.k.shape[-1] ** -0.5,
            **call.boundaries,
        )
        return {"q": q, "k": k, "w": w, "gk": g_sum, "dv": dv}

    def gradients(
        self, call: FlaBackward, initial: Tensor | None, d_final: Tensor | None
    ) -> Gradients:
        """The gradients of the inputs; ``initial`` and ``d_final`` are ``[N, H, K, V]``
        or None (zeros).

        After dg, fla returns the gradient of ``initial``, which is not read:
        :meth:`d_states` gives it to the callers that need it.
        """
        g_sum, Aqk, Akk = call.kept_tensors
        dq, dk, dv, *d_gates_and_dg = self.call_fla(
            self.backward_function,
            call,
            Aqk=Aqk,
            Akk=Akk,
            scale=call.inputs.k.shape[-1] ** -0.5,
            initial_state=initial,
            do=call.d_o,
            dht=d_final,
            g=g_sum,
            **self.chunk_and_backward_arguments,
        )
        # fla returns dg after the gates' gradients; the rule has g before the gates
        d_gates = d_gates_and_dg[: len(self.gate_arguments)]
        dg = d_gates_and_dg[len(self.gate_arguments)]
        return self.gradients_class(dq, dk, dv, dg, *d_gates)


def segments_of(inputs: Inputs, documents: Documents | None) -> Segments:
    """The segments whose state maps fla's kernel computes.

    Each segment is short enough for the kernel's 32-bit offsets.
    """
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
