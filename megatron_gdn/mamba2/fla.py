"""fla's ``simple_gla`` kernels as a rule of the SSD recurrence.

``simple_gla`` is linear attention with one decay per token and head: q = C, k = B, v = dt x. dt and
the skip D are applied around it, B and C are repeated for the heads of their group. With packed
documents fla reads a length from the device in every call.

Legend: B batch, S seq, G groups, H heads, K state dim, V head dim, N sequences.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..ops.documents import Documents
from ..ops.obstacles import fla_needs_tilelang
from ..ops.rules import fla_functions
from ..ops.rules.base import RuleOutput, Saved, in_rows
from ..ops.rules.fla_functions import why_not_called_so
from ..ops.state_maps.state_map import StateMap
from .plain import SSDInputs

CHUNK = 64
_MODULE = "fla.ops.simple_gla.chunk"
_OUTPUTS = "fla.ops.common.chunk_o"
_SEQUENCES = {"cu_seqlens", "chunk_size"}
_CALLED = {
    (_MODULE, "chunk_local_cumsum"): {"g", "scale", "reverse", "chunk_indices", *_SEQUENCES},
    (_MODULE, "chunk_fwd_h"): {
        "k", "v", "g", "h0", "output_final_state", "states_in_fp32", *_SEQUENCES,
    },
    (_MODULE, "chunk_bwd_dh"): {
        "q", "k", "v", "g", "do", "h0", "dht", "scale", "states_in_fp32", *_SEQUENCES,
    },
    (_MODULE, "chunk_bwd_dqkwg"): {
        "q", "k", "v", "g", "h", "do", "dh", "scale", "chunk_indices", *_SEQUENCES,
    },
    (_MODULE, "chunk_bwd_dv"): {
        "q", "k", "g", "do", "dh", "scale", "chunk_indices", *_SEQUENCES,
    },
    (_OUTPUTS, "chunk_fwd_kernel_o"): {
        "q", "k", "v", "h", "g", "g_gamma", "o", "cu_seqlens", "chunk_indices", "scale", "T", "H",
        "HV", "K", "V", "BT", "STATE_V_FIRST",
    },
}  # fmt: skip


@cache
def why_not_callable() -> str | None:
    """Which function of the installed fla cannot be called as in this package; None if all can."""
    return why_not_called_so(_MODULE, _CALLED)


def stages() -> Any:
    return import_module(_MODULE)


def output(of: _Operands, h: Tensor, g_sum: Tensor, boundaries: dict[str, Tensor | None]) -> Tensor:
    """o ``[B, S, H, V]`` in fp32: fla's own function would round it before the skip is added."""
    from fla.ops.common.chunk_o import chunk_fwd_kernel_o

    B, S, H, V = of.v.shape
    o = of.v.new_empty(B, S, H, V, dtype=torch.float32)
    indices = boundaries["chunk_indices"]
    chunks = -(-S // CHUNK) if indices is None else len(indices)
    chunk_fwd_kernel_o[lambda meta: (-(-V // meta["BV"]) * chunks, B * H)](
        q=of.q, k=of.k, v=of.v, h=h, g=g_sum, g_gamma=None, o=o, **boundaries, scale=1.0, T=S, H=H,
        HV=H, K=of.k.shape[-1], V=V, BT=CHUNK, STATE_V_FIRST=False,
    )  # fmt: skip
    return o


def _dense(state: Tensor | None) -> Tensor | None:
    """The state made contiguous, as the kernels read it; fla's own entry does the same."""
    return None if state is None else state.contiguous()


class _Operands:
    """q, k and v of ``simple_gla``: ``[B, S, H, K]`` twice and ``[B, S, H, V]``, contiguous."""

    def __init__(self, inputs: SSDInputs) -> None:
        heads, groups = inputs.x.shape[2], inputs.B.shape[2]
        q, k = inputs.C, inputs.B
        if heads != groups:
            q, k = (t.repeat_interleave(heads // groups, dim=2) for t in (q, k))
        self.q, self.k = q.contiguous(), k.contiguous()
        self.v = (inputs.x * inputs.dt[..., None]).to(inputs.x.dtype)


class FlaForward(fla_functions.FlaForward):
    def __init__(self, rule: Any, inputs: SSDInputs, documents: Documents | None) -> None:
        super().__init__(rule, inputs, documents)
        self._operands, fla = _Operands(self._inputs), stages()
        self._g_sum = fla.chunk_local_cumsum(
            self._inputs.g.contiguous(), chunk_size=CHUNK, scale=fla.RCP_LN2, **self._boundaries
        )

    def _decays(self) -> Tensor:
        """``[N, H]``, what is left of a state after every sequence."""
        g = self._inputs.g
        if self._documents is None:
            return g.sum(1).exp()
        lengths = self._documents.cu_seqlens.diff().long()
        return torch.segment_reduce(g[0], "sum", lengths=lengths, axis=0, unsafe=True).exp()

    @torch.no_grad()
    def state_map(self) -> StateMap:
        of = self._operands
        _, local = stages().chunk_fwd_h(
            k=of.k, v=of.v, g=self._g_sum, h0=None, output_final_state=True,
            cu_seqlens=self._boundaries["cu_seqlens"], chunk_size=CHUNK,
        )  # fmt: skip
        K = of.k.shape[-1]
        return StateMap(local, self._decays()[..., None, None].expand(-1, -1, K, 1))

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        of, inputs = self._operands, self._inputs
        h, last = stages().chunk_fwd_h(
            k=of.k, v=of.v, g=self._g_sum, h0=_dense(initial), output_final_state=final,
            cu_seqlens=self._boundaries["cu_seqlens"], chunk_size=CHUNK, states_in_fp32=False,
        )  # fmt: skip
        o = output(of, h, self._g_sum, self._boundaries)
        o = o.addcmul_(inputs.x, inputs.D).to(inputs.x.dtype)
        return self._output(o, last, self._g_sum)


class FlaBackward(fla_functions.FlaBackward):
    def __init__(
        self, rule: Any, d_o: Tensor, inputs: SSDInputs, saved: Saved, documents: Documents | None
    ) -> None:
        super().__init__(rule, d_o, inputs, saved, documents)
        (self._g_sum,), self._operands = saved.tensors, _Operands(self._inputs)

    @torch.no_grad()
    def d_initial(self) -> Tensor:
        of = self._operands
        initial = self._some_states(of.k.shape[-1])
        _, d_local = stages().chunk_bwd_dh(
            q=of.q, k=of.k, v=of.v, do=self._d_o, h0=initial, dht=None, scale=1.0, g=self._g_sum,
            cu_seqlens=self._boundaries["cu_seqlens"], chunk_size=CHUNK,
        )  # fmt: skip
        return d_local

    @torch.no_grad()
    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> SSDInputs:
        of, inputs, d_o, fla = self._operands, self._inputs, self._d_o, stages()
        initial, d_final = _dense(initial), _dense(d_final)
        # TileLang's kernel of the gates' gradient reads states in the operands' dtype, as fla's
        # forward writes them. fla's chunk_simple_gla_bwd keeps them in fp32 and raises with it.
        sequences = {"cu_seqlens": self._boundaries["cu_seqlens"], "chunk_size": CHUNK}
        states = {"states_in_fp32": not fla_needs_tilelang(of.q.device), **sequences}
        h, _ = fla.chunk_fwd_h(
            k=of.k, v=of.v, g=self._g_sum, h0=initial, output_final_state=False, **states
        )
        both = {"q": of.q, "k": of.k, "do": d_o, "g": self._g_sum, "scale": 1.0}
        d_h, _ = fla.chunk_bwd_dh(v=of.v, h0=initial, dht=d_final, **both, **states)
        indices = {"chunk_indices": self._boundaries["chunk_indices"], **sequences}
        d_q, d_k, _, d_g = fla.chunk_bwd_dqkwg(v=of.v, h=h, dh=d_h, **both, **indices)
        d_v = fla.chunk_bwd_dv(dh=d_h, **both, **indices)
        d_g = fla.chunk_local_cumsum(d_g, chunk_size=CHUNK, reverse=True, **self._boundaries)
        groups = inputs.B.shape[2]
        d_C, d_B = (
            t.unflatten(2, (groups, -1)).sum(3, dtype=torch.float32).to(inputs.B.dtype)
            for t in (d_q, d_k)
        )
        d_dt = (d_v.float() * inputs.x).sum(-1)
        d_x = (d_v * inputs.dt[..., None]).addcmul_(d_o.float(), inputs.D).to(inputs.x.dtype)
        d_D = d_o.float() * inputs.x
        if inputs.D.shape[3] == 1:
            d_D = d_D.sum(3, keepdim=True)
        found = (in_rows(t, self._rows) for t in (d_x, d_B, d_C, d_dt, d_g, d_D))
        return SSDInputs(*found)


class FlaSSD(fla_functions.FlaRule):
    """A rule over :class:`SSDInputs`."""

    reads_again = frozenset({"x", "B", "C", "dt", "D"})
    reads_boundaries = True
    forward, backward = FlaForward, FlaBackward
