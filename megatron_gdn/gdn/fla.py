"""fla's Triton kernels as a rule, through the functions beneath its autograd class.

Direct calls skip fla's own saved tensors and its copies of strided inputs, and let the mixer call
the backward. The functions are those of fla 0.6; :mod:`..ops.obstacles` checks that before this
rule is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleGrads, RuleInputs, inputs_in_one_row
from ..ops.documents import Documents
from ..ops.rules.base import RuleOutput, Saved, in_one_row, in_rows
from ..ops.rules.fla_functions import boundaries_of, parts_of, stages
from ..ops.state_maps.parts import CHUNK, compose
from ..ops.state_maps.state_map import StateMap


class _Triangular(NamedTuple):
    """Intermediates that the state maps and the forward share."""

    g_sum: Tensor  # [B, S, H] fp32, log2-decay summed within chunks
    A: Tensor  # [B, S, H, 64], inverse of the chunk's triangular system
    w: Tensor  # [B, S, H, K]
    u: Tensor  # [B, S, H, V]; a chunk writes u - w S


class FlaRule:
    """fla's gated delta rule for bf16 or fp16: ``backend="fla"``."""

    name = "fla"
    batch_invariant = False
    operand_dtype = None
    reads_again = frozenset({"q", "k", "v", "beta"})

    def why_not_heads(self, heads: int) -> None:
        """Any number of them can run."""

    def begin(self, inputs: RuleInputs, documents: Documents | None) -> FlaForward:
        return FlaForward(inputs, documents)

    def begin_backward(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> FlaBackward:
        return FlaBackward(d_o, inputs, saved, documents)


class FlaForward:
    def __init__(self, inputs: RuleInputs, documents: Documents | None) -> None:
        self._rows = inputs.v.shape[:2]
        self._inputs = inputs if documents is None else inputs_in_one_row(inputs)
        self._documents, self._boundaries = documents, boundaries_of(documents)
        self._triangular: _Triangular | None = None

    @torch.no_grad()
    def state_map(self) -> StateMap:
        from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h

        inputs, fla = self._inputs, stages()
        parts = parts_of(inputs, self._documents)
        g_sum = fla.chunk_local_cumsum(
            inputs.g, chunk_size=CHUNK, scale=fla.RCP_LN2, **self._boundaries
        )
        w, u, A = fla.chunk_gated_delta_rule_fwd_intra(
            k=inputs.k, v=inputs.v, g=g_sum, beta=inputs.beta, **self._boundaries
        )
        self._triangular = _Triangular(g_sum, A, w, u)
        # [local | through] of every part: the summaries that fla's own context parallelism sends.
        (K, V), P = (inputs.k.shape[-1], u.shape[-1]), len(parts.offsets) - 1
        maps = u.new_empty(P, u.shape[2], K, V + K, dtype=torch.float32)
        k, g_row, w_row, u_row = (x.flatten(0, 1)[None] for x in (inputs.k, g_sum, w, u))
        chunk_cp_fwd_h(
            k=k, w=w_row, u=u_row, hm=maps, g=g_row, cu_seqlens=parts.offsets,
            chunk_size=CHUNK, multi_seqs=True,
        )  # fmt: skip
        local, through = (x.contiguous() for x in maps.split([V, K], dim=-1))
        return StateMap(*compose(local, through, parts))

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        inputs, fla, boundaries = self._inputs, stages(), self._boundaries
        scale = inputs.k.shape[-1] ** -0.5
        if self._triangular is None:
            g_sum, o, A, last, *_ = fla.chunk_gated_delta_rule_fwd(
                **inputs._asdict(), scale=scale, initial_state=initial,
                output_final_state=final, **boundaries,
            )  # fmt: skip
        else:
            g_sum, A, w, u = self._triangular
            states, written, last = fla.chunk_gated_delta_rule_fwd_h(
                k=inputs.k, w=w, u=u, g=g_sum, initial_state=initial, output_final_state=final,
                **boundaries,
            )  # fmt: skip
            o = fla.chunk_fwd_o(
                q=inputs.q, k=inputs.k, v=written, h=states, g=g_sum, scale=scale, **boundaries
            )
        # The boundaries hold chunk indices, which would otherwise be built again on the host.
        return RuleOutput(in_rows(o, self._rows), last, Saved((g_sum, A), boundaries))


class FlaBackward:
    def __init__(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> None:
        self._rows = inputs.v.shape[:2]
        if documents is not None:
            d_o, inputs = in_one_row(d_o), inputs_in_one_row(inputs)
        self._d_o, self._inputs, self._documents = d_o, inputs, documents
        (self._g_sum, self._A), self._boundaries = saved.tensors, saved.plan

    def d_initial(self) -> Tensor:
        inputs, fla, boundaries = self._inputs, stages(), self._boundaries
        scale = inputs.k.shape[-1] ** -0.5
        (B, _, H, V), K = inputs.v.shape, inputs.k.shape[-1]
        N = B if self._documents is None else len(self._documents.cu_seqlens) - 1
        w, _ = fla.recompute_w_u_fwd(
            k=inputs.k, v=inputs.v, beta=inputs.beta, A=self._A, g=self._g_sum, **boundaries
        )
        d_written = fla.chunk_bwd_dv_local(
            q=inputs.q, k=inputs.k, g=self._g_sum, do=self._d_o, scale=scale, **boundaries
        )
        # fla computes the gradient of initial states only if it gets some; it reads no values.
        initial = self._g_sum.new_empty(N, H, K, V)
        _, d_local, _ = fla.chunk_gated_delta_rule_bwd_dhu(
            q=inputs.q, k=inputs.k, w=w, g=self._g_sum, h0=initial, dht=None, do=self._d_o,
            dv=d_written, scale=scale, **boundaries,
        )  # fmt: skip
        return d_local

    def d_o_was_scaled(self, by: Tensor) -> None:
        """Does nothing: no tensor made from d_o is kept."""

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        inputs = self._inputs
        dq, dk, dv, dbeta, dg, *_ = stages().chunk_gated_delta_rule_bwd(
            **inputs._replace(g=self._g_sum)._asdict(), A=self._A,
            scale=inputs.k.shape[-1] ** -0.5, initial_state=initial, do=self._d_o, dht=d_final,
            **self._boundaries,
        )  # fmt: skip
        return RuleGrads(*(in_rows(x, self._rows) for x in (dq, dk, dv, dg, dbeta)))
