"""fla's Triton kernels of Kimi Delta Attention as a rule, through the functions of its stages.

The states run through the kernels of the gated delta rule, with a decay per channel. So the stages
are those of :mod:`..gdn.fla`. The running sums of g are made again in the backward: they are
as large as q, k and v together.

Legend: B batch, S seq, H heads, K key dim, V value dim.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleGrads, RuleInputs, inputs_in_one_row
from ..ops.documents import Documents
from ..ops.rules.base import RuleOutput, Saved, in_one_row, in_rows
from ..ops.rules.fla_functions import (
    SEQUENCES,
    boundaries_of,
    checked_module,
    parts_of,
    why_not_called_so,
)
from ..ops.state_maps.parts import CHUNK, compose
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
    ("fla.ops.utils.index", "prepare_chunk_indices"): {"cu_seqlens_cpu"},
}  # fmt: skip


@cache
def why_not_callable() -> str | None:
    """Which function of the installed fla cannot be called as here; None if all can."""
    return why_not_called_so(_FORWARD, _CALLED)


def _forward_stages() -> ModuleType:
    return checked_module(_FORWARD, why_not_callable())


def _backward_stages() -> ModuleType:
    return checked_module(_BACKWARD, why_not_callable())


def _sums(g: Tensor, boundaries: dict[str, Tensor | None]) -> Tensor:
    """``[B, S, H, K]`` fp32: log2-decays summed within chunks."""
    fla = _forward_stages()
    return fla.chunk_local_cumsum(g, chunk_size=CHUNK, scale=fla.RCP_LN2, **boundaries)


class _Inside(NamedTuple):
    """Intermediates that the state maps and the forward share."""

    g_sum: Tensor  # [B, S, H, K] fp32
    w: Tensor  # [B, S, H, K]
    u: Tensor  # [B, S, H, V]; a chunk writes u - w S
    kg: Tensor  # [B, S, H, K], k decayed to the end of its chunk
    Aqk: Tensor  # [B, S, H, 64]
    Akk: Tensor  # [B, S, H, 64], inverse of the chunk's triangular system


class FlaKDA:
    """fla's KDA for bf16 or fp16: ``backend="fla"``.

    Args:
        lower_bound: of g; None: unbounded. Where 16 of them fit the range of fp32, fla computes the
            chunks' diagonal blocks on tensor cores.
    """

    name = "fla"
    batch_invariant = False
    operand_dtype = None
    reads_again = frozenset(RuleInputs._fields)

    def __init__(self, lower_bound: float | None = None) -> None:
        self._safe = lower_bound is not None and lower_bound >= _SAFE_FROM

    def why_not_heads(self, heads: int) -> None:
        """Any number of them can run."""

    def begin(self, inputs: RuleInputs, documents: Documents | None) -> FlaForward:
        return FlaForward(inputs, documents, self._safe)

    def begin_backward(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> FlaBackward:
        return FlaBackward(d_o, inputs, saved, documents, self._safe)


class FlaForward:
    def __init__(self, inputs: RuleInputs, documents: Documents | None, safe: bool) -> None:
        self._rows = inputs.v.shape[:2]
        self._inputs = inputs if documents is None else inputs_in_one_row(inputs)
        self._documents, self._boundaries = documents, boundaries_of(documents)
        self._safe, self._made = safe, None

    def _inside(self) -> _Inside:
        if self._made is None:
            q, k, v, g, beta = self._inputs
            g_sum = _sums(g, self._boundaries)
            w, u, _, kg, Aqk, Akk = _forward_stages().chunk_kda_fwd_intra(
                q=q, k=k, v=v, gk=g_sum, beta=beta, scale=k.shape[-1] ** -0.5,
                safe_gate=self._safe, **self._boundaries,
            )  # fmt: skip
            self._made = _Inside(g_sum, w, u, kg, Aqk, Akk)
        return self._made

    @torch.no_grad()
    def state_map(self) -> StateMap:
        from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h

        inputs, inside = self._inputs, self._inside()
        parts = parts_of(inputs, self._documents)
        # [local | through] of every part: the summaries that fla's own context parallelism sends.
        (K, V), P = (inputs.k.shape[-1], inputs.v.shape[-1]), len(parts.offsets) - 1
        maps = inside.u.new_empty(P, inside.u.shape[2], K, V + K, dtype=torch.float32)
        row = {
            name: getattr(inside, name).flatten(0, 1)[None] for name in ("kg", "w", "u", "g_sum")
        }
        chunk_cp_fwd_h(
            k=row["kg"], w=row["w"], u=row["u"], hm=maps, gk=row["g_sum"],
            cu_seqlens=parts.offsets, chunk_size=CHUNK, multi_seqs=True,
        )  # fmt: skip
        local, through = (x.contiguous() for x in maps.split([V, K], dim=-1))
        return StateMap(*compose(local, through, parts))

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        g_sum, w, u, kg, Aqk, Akk = self._inside()
        self._made, fla, q = None, _forward_stages(), self._inputs.q
        states, written, last = fla.chunk_gated_delta_rule_fwd_h(
            k=kg, w=w, u=u, gk=g_sum, initial_state=initial, output_final_state=final,
            **self._boundaries,
        )  # fmt: skip
        o = fla.chunk_gla_fwd_o_gk(
            q=q, v=written, g=g_sum, A=Aqk, h=states, scale=q.shape[-1] ** -0.5, **self._boundaries
        )
        # The boundaries hold chunk indices, which would otherwise be built again on the host.
        return RuleOutput(in_rows(o, self._rows), last, Saved((Aqk, Akk), self._boundaries))


class FlaBackward:
    def __init__(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None, safe: bool
    ) -> None:
        self._rows = inputs.v.shape[:2]
        if documents is not None:
            d_o, inputs = in_one_row(d_o), inputs_in_one_row(inputs)
        self._d_o, self._inputs, self._documents, self._safe = d_o, inputs, documents, safe
        (self._Aqk, self._Akk), self._boundaries = saved.tensors, saved.plan
        self._g_sum = _sums(inputs.g, self._boundaries)

    def d_initial(self) -> Tensor:
        (q, k, v, _, beta), fla, boundaries = self._inputs, _backward_stages(), self._boundaries
        (B, _, H, V), K = v.shape, k.shape[-1]
        N = B if self._documents is None else len(self._documents.cu_seqlens) - 1
        w, u, qg, kg = fla.recompute_w_u_fwd(
            q=q, k=k, v=v, beta=beta, A=self._Akk, gk=self._g_sum, **boundaries
        )
        _, d_written = fla.chunk_kda_bwd_dAv(
            q=q, k=k, v=u, do=self._d_o, A=self._Aqk, scale=K**-0.5, **boundaries
        )
        # fla computes the gradient of initial states only if it gets some; it reads no values.
        initial = self._g_sum.new_empty(N, H, K, V)
        _, d_local, _ = fla.chunk_gated_delta_rule_bwd_dhu(
            q=qg, k=kg, w=w, gk=self._g_sum, h0=initial, dht=None, do=self._d_o, dv=d_written,
            scale=K**-0.5, **boundaries,
        )  # fmt: skip
        return d_local

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        q, k, v, _, beta = self._inputs
        dq, dk, dv, dbeta, dg, *_ = _backward_stages().chunk_kda_bwd(
            q=q, k=k, v=v, beta=beta, Aqk=self._Aqk, Akk=self._Akk, scale=k.shape[-1] ** -0.5,
            initial_state=initial, do=self._d_o, dht=d_final, g=self._g_sum, safe_gate=self._safe,
            **self._boundaries,
        )  # fmt: skip
        return RuleGrads(*(in_rows(x, self._rows) for x in (dq, dk, dv, dg, dbeta)))
