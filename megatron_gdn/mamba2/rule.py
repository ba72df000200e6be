"""The rules of a Mamba2 mixer: the state-space dual (SSD), in plain torch or by fla's
kernels.

    S_t = exp(g_t) S_{t-1} + dt_t B_t x_t^T        o_t = S_t^T C_t + D_t x_t

Each head is linear attention with a scalar decay (Dao, Gu, *Transformers are SSMs*,
2024). The H / G neighbouring heads of a group use the same B and C.

fla's ``simple_gla`` gets q = C, k = B and v = dt x, with B and C repeated for the heads
of a group; the skip D x is added afterwards. If documents are packed, fla reads their
lengths on the host. The argument ``call`` of a rule's method is a forward or a
backward, with its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.delta_rule.chunk_math import ChunkValues
from ..ops.delta_rule.plain import PlainRule
from ..ops.obstacles import fla_needs_tilelang
from ..ops.rules.base import Bits
from ..ops.rules.choice import Choice, choose
from ..ops.rules.chunk_table import CHUNK
from ..ops.rules.fla import (
    Boundaries,
    ChunkProducts,
    FlaBackward,
    FlaForward,
    FlaRule,
    tested_on_h200,
)
from ..ops.state_maps.state_map import StateMap, StateShape

# the default ``dt_limit``, which clamps no time step
UNLIMITED_TIME_STEPS = (0.0, math.inf)
_FLA_MODULE = "fla.ops.simple_gla.chunk"


class SSDInputs(NamedTuple):
    """Inputs of the rule, or gradients in the same shapes."""

    x: Tensor  # [B, S, H, V], the values
    B: Tensor  # [B, S, G, K], the keys
    C: Tensor  # [B, S, G, K], the queries
    dt: Tensor  # [B, S, H] fp32 time steps, >= 0
    g: Tensor  # [B, S, H] fp32 log-decay, <= 0
    D: Tensor  # [B, S, H, 1 or V] fp32; a parameter, expanded with stride 0 over tokens

    # Code that serves all rules reads the shapes of k and v.

    @property
    def k(self) -> Tensor:
        return self.B

    @property
    def v(self) -> Tensor:
        return self.x


class PlainSSD(PlainRule):
    """The SSD rule in chunks, in plain torch: ``backend="reference"``."""

    backward_reads = frozenset(SSDInputs._fields)
    gradients_class = SSDInputs
    erases = False

    def values(self, chunks: SSDInputs) -> ChunkValues:
        """The values for :func:`.chunk_math.run_group`; ``chunks`` are the inputs'
        chunks ``[n heads, C, ...]``. ``e`` is None: nothing is erased."""
        x, B, C, dt, g, D = chunks
        return ChunkValues(C, B, None, dt[..., None] * x, g, skip=D * x)


def _simple_gla_operands(inputs: SSDInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q and k ``[B, S, H, K]`` and v ``[B, S, H, V]`` of ``simple_gla``, contiguous."""
    heads = inputs.x.shape[2]
    groups = inputs.B.shape[2]
    q, k = inputs.C, inputs.B
    if heads != groups:
        q, k = (t.repeat_interleave(heads // groups, dim=2) for t in (q, k))
    v = (inputs.x * inputs.dt[..., None]).to(inputs.x.dtype)
    return q.contiguous(), k.contiguous(), v


def _chunk_arguments(boundaries: Boundaries) -> dict[str, object]:
    """Boundaries for functions of fla that take ``chunk_size`` but no
    ``chunk_indices``."""
    return {"cu_seqlens": boundaries["cu_seqlens"], "chunk_size": CHUNK}


class FlaSSD(FlaRule):
    """The SSD rule by fla's ``simple_gla``: ``backend="fla"``."""

    backward_reads = frozenset({"x", "B", "C", "dt", "D"})
    repeatable_setups = (tested_on_h200((128, 64)),)
    reads_boundaries_on_host = True
    fla_functions = {
        f"{_FLA_MODULE} chunk_local_cumsum": (
            "g scale reverse chunk_indices cu_seqlens chunk_size"
        ),
        f"{_FLA_MODULE} chunk_fwd_h": (
            "k v g h0 output_final_state states_in_fp32 cu_seqlens chunk_size"
        ),
        f"{_FLA_MODULE} chunk_bwd_dh": (
            "q k v g do h0 dht scale states_in_fp32 cu_seqlens chunk_size"
        ),
        f"{_FLA_MODULE} chunk_bwd_dqkwg": (
            "q k v g h do dh scale chunk_indices cu_seqlens chunk_size"
        ),
        f"{_FLA_MODULE} chunk_bwd_dv": (
            "q k g do dh scale chunk_indices cu_seqlens chunk_size"
        ),
        "fla.ops.common.chunk_o chunk_fwd_kernel_o": (
            "q k v h g g_gamma o cu_seqlens chunk_indices scale T H HV K V BT "
            "STATE_V_FIRST"
        ),
    }

    @classmethod
    def why_not_sizes(cls, state: StateShape) -> str | None:
        """Why fla's kernels cannot compute states of this shape; None if they can."""
        if state.rows > 256:
            return f"fla takes a state dim up to 256, not {state.rows}"
        for name, dim in (("state", state.rows), ("head", state.columns)):
            if dim % 2:
                return f"fla's backward takes an even {name} dim, not {dim}"
        return None

    def chunk_products(self, call: FlaForward) -> ChunkProducts:
        """q, k, v and the sums of g within chunks, divided by ln 2, since fla computes
        2^x. A state without erasing needs no products within chunks."""
        g_sum = self.fla.chunk_local_cumsum(
            call.inputs.g.contiguous(),
            chunk_size=CHUNK,
            scale=self.fla.RCP_LN2,
            **call.boundaries,
        )
        q, k, v = _simple_gla_operands(call.inputs)
        return ChunkProducts({"k": k, "v": v, "g": g_sum}, (g_sum,), q)

    def state_map(self, call: FlaForward, products: ChunkProducts) -> StateMap:
        """The maps ``[N, H, K, V]`` and ``[N, H, K, 1]``: the final states from zeros,
        and the decay of all tokens.

        ``unsafe=True`` leaves out torch's check of the lengths, for which the host
        would wait.
        """
        _, local = self.fla.chunk_fwd_h(
            **products.states_arguments,
            h0=None,
            output_final_state=True,
            **_chunk_arguments(call.boundaries),
        )
        g, K = call.inputs.g, local.shape[2]
        if call.documents is None:
            decays = g.sum(1).exp()
        else:
            lengths = call.documents.cu_seqlens.diff().long()
            decays = torch.segment_reduce(
                g[0], "sum", lengths=lengths, axis=0, unsafe=True
            ).exp()
        return StateMap(local, decays[..., None, None].expand(-1, -1, K, 1))

    def pass_states(
        self,
        call: FlaForward,
        products: ChunkProducts,
        initial: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The states before each chunk, the values that tokens write to the state (here
        v), and the final states if ``final``."""
        states, last = self.fla.chunk_fwd_h(
            **products.states_arguments,
            h0=initial,
            output_final_state=final,
            states_in_fp32=False,
            **_chunk_arguments(call.boundaries),
        )
        return states, products.states_arguments["v"], last

    def output(
        self, call: FlaForward, products: ChunkProducts, states: Tensor, written: Tensor
    ) -> Tensor:
        """The output ``S^T C + D x``, from ``states`` before chunks.

        ``products.states_arguments`` has k ``[B, S, H, K]``, v ``[B, S, H, V]`` and g of
        `_simple_gla_operands`. This method calls fla's kernel, since fla's function
        would round o before the skip is added.
        """
        v = products.states_arguments["v"]
        B, S, H, V = v.shape
        o = v.new_empty(B, S, H, V, dtype=torch.float32)
        indices = call.boundaries["chunk_indices"]
        if indices is None:
            chunks = -(-S // CHUNK)
        else:
            chunks = len(indices)

        def grid(constants: Mapping[str, int]) -> tuple[int, int]:
            """The kernel's grid; fla chooses BV, the columns of a program."""
            return -(-V // constants["BV"]) * chunks, B * H

        k = products.states_arguments["k"]
        self.fla.chunk_fwd_kernel_o[grid](
            q=products.scores,
            k=k,
            v=v,
            h=states,
            g=products.states_arguments["g"],
            g_gamma=None,
            o=o,
            **call.boundaries,
            scale=1.0,
            T=S,
            H=H,
            HV=H,
            K=k.shape[-1],
            V=V,
            BT=CHUNK,
            STATE_V_FIRST=False,
        )
        return o.addcmul_(call.inputs.x, call.inputs.D).to(call.inputs.x.dtype)

    def kept_for_backward(self, call: FlaBackward) -> tuple[Tensor, ...]:
        """The saved tensors (g_sum), then q, k and v of `_simple_gla_operands`, which
        are computed again here."""
        return call.saved.tensors + _simple_gla_operands(call.inputs)

    def d_states(self, call: FlaBackward, any_states: Tensor) -> Tensor:
        """The gradients of the initial states, with zero gradients of the final states.

        ``any_states`` has the shape of the initial states; its values are not read.
        """
        g_sum, q, k, v = call.kept_tensors
        _, d_local = self.fla.chunk_bwd_dh(
            q=q,
            k=k,
            v=v,
            do=call.d_o,
            h0=any_states,
            dht=None,
            scale=1.0,
            g=g_sum,
            **_chunk_arguments(call.boundaries),
        )
        return d_local

    def gradients(
        self, call: FlaBackward, initial: Tensor | None, d_final: Tensor | None
    ) -> SSDInputs:
        """The gradients of the inputs, in the shapes of :class:`SSDInputs`; ``initial``
        and ``d_final`` are ``[N, H, K, V]`` or None (zeros).

        fla gives the gradients of q, k and v of `_simple_gla_operands`. dC and dB are
        sums over the heads of a group. dD has a token dimension, over which the front
        sums.
        """
        inputs = call.inputs
        g_sum, q, k, v = call.kept_tensors
        fla = self.fla
        # TileLang's kernel for the gradient of g reads states in the operands' dtype,
        # as fla's forward writes them. TileLang raises for the fp32 states of fla's
        # chunk_simple_gla_bwd.
        states = {
            "states_in_fp32": not fla_needs_tilelang(q.device),
            **_chunk_arguments(call.boundaries),
        }
        # h and d_h: the states before chunks and their gradients
        h, _ = fla.chunk_fwd_h(
            k=k, v=v, g=g_sum, h0=initial, output_final_state=False, **states
        )
        common = {"q": q, "k": k, "do": call.d_o, "g": g_sum, "scale": 1.0}
        d_h, _ = fla.chunk_bwd_dh(v=v, h0=initial, dht=d_final, **common, **states)
        boundaries = {
            "chunk_indices": call.boundaries["chunk_indices"],
            **_chunk_arguments(call.boundaries),
        }
        d_q, d_k, _, d_g = fla.chunk_bwd_dqkwg(v=v, h=h, dh=d_h, **common, **boundaries)
        d_v = fla.chunk_bwd_dv(dh=d_h, **common, **boundaries)
        d_g = fla.chunk_local_cumsum(
            d_g, chunk_size=CHUNK, reverse=True, **call.boundaries
        )
        groups = inputs.B.shape[2]
        d_C, d_B = (
            t.unflatten(2, (groups, -1)).sum(3, dtype=torch.float32).to(inputs.B.dtype)
            for t in (d_q, d_k)
        )
        d_dt = (d_v.float() * inputs.x).sum(-1)
        d_x = (
            (d_v * inputs.dt[..., None]).addcmul_(call.d_o, inputs.D).to(inputs.x.dtype)
        )
        d_D = call.d_o.float() * inputs.x
        if inputs.D.shape[3] == 1:
            d_D = d_D.sum(3, keepdim=True)
        return SSDInputs(d_x, d_B, d_C, d_dt, d_g, d_D)


RULES = FlaSSD, PlainSSD  # in the order of preference


def choose_ssd(
    backend: str,
    state: StateShape,
    device: torch.device,
    dtype: torch.dtype,
    bits: Bits = Bits.FREE,
) -> Choice:
    """Choose the rule of a Mamba2 mixer for heads with this ``state``.

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
        backend, "Mamba2", RULES, device=device, dtype=dtype, sizes=state, bits=bits
    )
