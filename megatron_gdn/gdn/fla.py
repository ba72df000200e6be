"""fla's kernels of the gated delta rule as a rule."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.delta_rule.base import RuleGrads
from ..ops.delta_rule.fla import OF_STATES, FlaDeltaRule
from ..ops.rules.fla import SEQUENCES, FlaBackward, FlaForward, Inside

_HOME = "fla.ops.gated_delta_rule.chunk"


class FlaGDN(FlaDeltaRule):
    reads_again = frozenset({"q", "k", "v", "beta"})
    called = {
        **OF_STATES,
        f"{_HOME} chunk_gated_delta_rule_fwd_intra": f"k v g beta {SEQUENCES}",
        f"{_HOME} chunk_fwd_o": f"q k v h g scale {SEQUENCES}",
        f"{_HOME} recompute_w_u_fwd": f"k v beta A g {SEQUENCES}",
        f"{_HOME} chunk_bwd_dv_local": f"q k g do scale {SEQUENCES}",
        f"{_HOME} chunk_gated_delta_rule_bwd":
            f"q k v g beta A scale initial_state do dht {SEQUENCES}",
    }  # fmt: skip

    def inside(self, x: FlaForward) -> Inside:
        _, k, v, _, beta = x.inputs
        g_sum = self.sums(x)
        w, u, A = self.fla.chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g_sum, beta=beta, **x.at)
        return Inside({"k": k, "w": w, "u": u, "g": g_sum}, (g_sum, A))

    def output(self, x: FlaForward, made: Inside, states: Any, written: Tensor) -> Tensor:
        q, k, *_ = x.inputs
        return self.fla.chunk_fwd_o(
            q=q, k=k, v=written, h=states, g=made.chunks["g"], scale=k.shape[-1] ** -0.5, **x.at
        )

    def readers(self, x: FlaBackward) -> dict[str, Tensor]:
        (q, k, v, _, beta), (g_sum, A) = x.inputs, x.kept
        w, _ = self.fla.recompute_w_u_fwd(k=k, v=v, beta=beta, A=A, g=g_sum, **x.at)
        dv = self.fla.chunk_bwd_dv_local(
            q=q, k=k, g=g_sum, do=x.d_o, scale=k.shape[-1] ** -0.5, **x.at
        )
        return {"q": q, "k": k, "w": w, "g": g_sum, "dv": dv}

    def gradients(
        self, x: FlaBackward, initial: Tensor | None, d_final: Tensor | None
    ) -> RuleGrads:
        (q, k, v, _, beta), (g_sum, A) = x.inputs, x.kept
        dq, dk, dv, dbeta, dg, *_ = self.fla.chunk_gated_delta_rule_bwd(
            q=q, k=k, v=v, g=g_sum, beta=beta, A=A, scale=k.shape[-1] ** -0.5,
            initial_state=initial, do=x.d_o, dht=d_final, **x.at,
        )  # fmt: skip
        return RuleGrads(dq, dk, dv, dg, dbeta)
