"""fla's kernels of Kimi Delta Attention as a rule.

The states run through the kernels of the gated delta rule, with a decay per channel. The running
sums of g are made again in the backward: they are as large as q, k and v together.

Legend: B batch, S seq, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from functools import cache, cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleGrads, RuleInputs
from ..ops.rules import fla_functions
from ..ops.rules.base import RuleOutput, in_rows
from ..ops.rules.fla_functions import SEQUENCES, why_not_called_so
from ..ops.state_maps.parts import CHUNK
from ..ops.state_maps.state_map import StateMap

_FORWARD, _BACKWARD = "fla.ops.kda.chunk_fwd", "fla.ops.kda.chunk_bwd"
_STATES = {"k", "w", "gk", "scale", *SEQUENCES}
_SAFE_FROM = -5.0  # fla's kernels for bounded gates take sums of 16 of them

# Module, function: the arguments that are passed by name.
_CALLED = {
    (_FORWARD, "chunk_local_cumsum"): {"g", "chunk_size", "scale", *SEQUENCES},
    (_FORWARD, "chunk_kda_fwd_intra"): {
        "q", "k", "v", "gk", "beta", "scale", "safe_gate", *SEQUENCES,
    },
    (_FORWARD, "chunk_gated_delta_rule_fwd_h"): {
        "k", "w", "u", "gk", "initial_state", "output_final_state", *SEQUENCES,
    },
    (_FORWARD, "chunk_gla_fwd_o_gk"): {"q", "v", "g", "A", "h", "scale", *SEQUENCES},
    (_BACKWARD, "recompute_w_u_fwd"): {"q", "k", "v", "beta", "A", "gk", *SEQUENCES},
    (_BACKWARD, "chunk_kda_bwd_dAv"): {"q", "k", "v", "do", "A", "scale", *SEQUENCES},
    (_BACKWARD, "chunk_gated_delta_rule_bwd_dhu"): {"q", "do", "dv", "h0", "dht", *_STATES},
    (_BACKWARD, "chunk_kda_bwd"): {
        "q", "k", "v", "beta", "Aqk", "Akk", "scale", "initial_state", "do", "dht", "g",
        "safe_gate", *SEQUENCES,
    },
    ("fla.ops.cp.chunk_fwd", "chunk_cp_fwd_h"): {
        "k", "w", "u", "hm", "gk", "cu_seqlens", "chunk_size", "multi_seqs",
    },
}  # fmt: skip


@cache
def why_not_callable() -> str | None:
    """Which function of the installed fla cannot be called as here; None if all can."""
    return why_not_called_so(_FORWARD, _CALLED)


def _sums(g: Tensor, boundaries: dict[str, Tensor | None]) -> Tensor:
    """``[B, S, H, K]`` fp32: log2-decays summed within chunks."""
    fla: Any = import_module(_FORWARD)
    return fla.chunk_local_cumsum(g, chunk_size=CHUNK, scale=fla.RCP_LN2, **boundaries)


class FlaForward(fla_functions.FlaForward):
    _made: tuple[Tensor, ...] | None = None

    def _inside(self) -> tuple[Tensor, ...]:
        """What the state maps and the forward share.

        The sums of g; w and u, where a chunk writes u - w S; k decayed to the end of its chunk;
        products of q and k, and the inverse of the chunk's system, ``[B, S, H, 64]`` each.
        """
        if self._made is None:
            q, k, v, g, beta = self._inputs
            g_sum, fla = _sums(g, self._boundaries), import_module(_FORWARD)
            w, u, _, kg, Aqk, Akk = fla.chunk_kda_fwd_intra(
                q=q, k=k, v=v, gk=g_sum, beta=beta, scale=k.shape[-1] ** -0.5,
                safe_gate=self._rule.safe_gate, **self._boundaries,
            )  # fmt: skip
            self._made = g_sum, w, u, kg, Aqk, Akk
        return self._made

    @torch.no_grad()
    def state_map(self) -> StateMap:
        g_sum, w, u, kg, *_ = self._inside()
        return self._maps(kg, w, u, gk=g_sum)

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        g_sum, w, u, kg, Aqk, Akk = self._inside()
        self._made, fla, q = None, import_module(_FORWARD), self._inputs.q
        states, written, last = fla.chunk_gated_delta_rule_fwd_h(
            k=kg, w=w, u=u, gk=g_sum, initial_state=initial, output_final_state=final,
            **self._boundaries,
        )  # fmt: skip
        o = fla.chunk_gla_fwd_o_gk(
            q=q, v=written, g=g_sum, A=Aqk, h=states, scale=q.shape[-1] ** -0.5, **self._boundaries
        )
        return self._output(o, last, Aqk, Akk)


class FlaBackward(fla_functions.FlaBackward):
    @cached_property
    def _g_sum(self) -> Tensor:
        return _sums(self._inputs.g, self._boundaries)

    def d_initial(self) -> Tensor:
        (q, k, v, _, beta), (Aqk, Akk) = self._inputs, self._saved.tensors
        fla, boundaries = import_module(_BACKWARD), self._boundaries
        w, u, qg, kg = fla.recompute_w_u_fwd(
            q=q, k=k, v=v, beta=beta, A=Akk, gk=self._g_sum, **boundaries
        )
        K = k.shape[-1]
        of_o = {"do": self._d_o, "scale": K**-0.5, **boundaries}
        _, d_written = fla.chunk_kda_bwd_dAv(q=q, k=k, v=u, A=Aqk, **of_o)
        _, d_local, _ = fla.chunk_gated_delta_rule_bwd_dhu(
            q=qg, k=kg, w=w, gk=self._g_sum, h0=self._some_states(K), dht=None, dv=d_written, **of_o
        )
        return d_local

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        (q, k, v, _, beta), (Aqk, Akk) = self._inputs, self._saved.tensors
        dq, dk, dv, dbeta, dg, *_ = import_module(_BACKWARD).chunk_kda_bwd(
            q=q, k=k, v=v, beta=beta, Aqk=Aqk, Akk=Akk, scale=k.shape[-1] ** -0.5,
            initial_state=initial, do=self._d_o, dht=d_final, g=self._g_sum,
            safe_gate=self._rule.safe_gate, **self._boundaries,
        )  # fmt: skip
        return RuleGrads(*(in_rows(x, self._rows) for x in (dq, dk, dv, dg, dbeta)))


class FlaKDA(fla_functions.FlaRule):
    """fla's KDA; with a ``lower_bound`` of g of which 16 fit fp32, in its faster kernels."""

    reads_again = frozenset(RuleInputs._fields)
    forward, backward = FlaForward, FlaBackward

    def __init__(self, lower_bound: float | None = None) -> None:
        self.safe_gate = lower_bound is not None and lower_bound >= _SAFE_FROM
