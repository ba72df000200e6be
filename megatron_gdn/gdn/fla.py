"""fla's kernels of the gated delta rule as a rule.

Legend: B batch, S seq, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleGrads
from ..ops.rules import fla_functions
from ..ops.rules.base import RuleOutput, in_rows
from ..ops.rules.fla_functions import stages
from ..ops.state_maps.parts import CHUNK
from ..ops.state_maps.state_map import StateMap


class FlaForward(fla_functions.FlaForward):
    _triangular: tuple[Tensor, ...] | None = None

    @torch.no_grad()
    def state_map(self) -> StateMap:
        _, k, v, g, beta = self._inputs
        fla, boundaries = stages(), self._boundaries
        # [B, S, H] fp32, log2-decay summed within chunks
        g_sum = fla.chunk_local_cumsum(g, chunk_size=CHUNK, scale=fla.RCP_LN2, **boundaries)
        # [B, S, H, K] and [B, S, H, V]; [B, S, H, 64], inverse of the chunk's triangular system
        w, u, A = fla.chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g_sum, beta=beta, **boundaries)
        self._triangular = g_sum, A, w, u
        return self._maps(k, w, u, g=g_sum)

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        inputs, fla, boundaries = self._inputs, stages(), self._boundaries
        scale = inputs.k.shape[-1] ** -0.5
        states = {"initial_state": initial, "output_final_state": final, **boundaries}
        if self._triangular is None:
            g_sum, o, A, last, *_ = fla.chunk_gated_delta_rule_fwd(
                **inputs._asdict(), scale=scale, **states
            )
        else:
            g_sum, A, w, u = self._triangular
            h, written, last = fla.chunk_gated_delta_rule_fwd_h(
                k=inputs.k, w=w, u=u, g=g_sum, **states
            )
            o = fla.chunk_fwd_o(
                q=inputs.q, k=inputs.k, v=written, h=h, g=g_sum, scale=scale, **boundaries
            )
        return self._output(o, last, g_sum, A)


class FlaBackward(fla_functions.FlaBackward):
    def d_initial(self) -> Tensor:
        q, k, v, _, beta = self._inputs
        (g_sum, A), fla, boundaries, K = (
            self._saved.tensors,
            stages(),
            self._boundaries,
            k.shape[-1],
        )
        w, _ = fla.recompute_w_u_fwd(k=k, v=v, beta=beta, A=A, g=g_sum, **boundaries)
        of_o = {"g": g_sum, "do": self._d_o, "scale": K**-0.5, **boundaries}
        d_written = fla.chunk_bwd_dv_local(q=q, k=k, **of_o)
        _, d_local, _ = fla.chunk_gated_delta_rule_bwd_dhu(
            q=q, k=k, w=w, h0=self._some_states(K), dht=None, dv=d_written, **of_o
        )
        return d_local

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        g_sum, A = self._saved.tensors
        inputs = self._inputs._replace(g=g_sum)
        dq, dk, dv, dbeta, dg, *_ = stages().chunk_gated_delta_rule_bwd(
            **inputs._asdict(), A=A, scale=inputs.k.shape[-1] ** -0.5,
            initial_state=initial, do=self._d_o, dht=d_final, **self._boundaries,
        )  # fmt: skip
        return RuleGrads(*(in_rows(x, self._rows) for x in (dq, dk, dv, dg, dbeta)))


class FlaRule(fla_functions.FlaRule):
    reads_again = frozenset({"q", "k", "v", "beta"})
    forward, backward = FlaForward, FlaBackward
