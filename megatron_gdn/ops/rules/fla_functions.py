"""fla (flash-linear-attention) as a rule: what its mixers share, and a check of what they call.

The rules call functions beneath fla's autograd classes, which copy strided inputs and save tensors
of their own. They are those of fla 0.6, so their arguments are checked before a rule is chosen.
Importing fla takes seconds, so nothing here does before a GPU backend is considered.

Legend: B batch, S seq, N sequences, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..documents import Documents, documents_of_rows
from ..state_maps.parts import CHUNK, Parts, compose, cut_by_length
from ..state_maps.state_map import StateMap
from .base import Rule, RuleBackward, RuleForward, RuleOutput, Saved, in_rows

SEQUENCES = {"cu_seqlens", "chunk_indices"}
_RULE = "fla.ops.gated_delta_rule.chunk"

Boundaries = dict[str, Tensor | None]  # fla's arguments of these names

# Of the gated delta rule. Module, function: the arguments that are passed by name.
_CALLED = {
    (_RULE, "chunk_gated_delta_rule_fwd"): {
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", *SEQUENCES,
    },
    (_RULE, "chunk_gated_delta_rule_bwd"): {
        "q", "k", "v", "g", "beta", "A", "scale", "initial_state", "do", "dht", *SEQUENCES,
    },
    (_RULE, "chunk_local_cumsum"): {"g", "chunk_size", "scale", *SEQUENCES},
    (_RULE, "chunk_gated_delta_rule_fwd_intra"): {"k", "v", "g", "beta", *SEQUENCES},
    (_RULE, "chunk_gated_delta_rule_fwd_h"): {"k", "w", "u", "g", "initial_state", *SEQUENCES},
    (_RULE, "chunk_fwd_o"): {"q", "k", "v", "h", "g", "scale", *SEQUENCES},
    (_RULE, "recompute_w_u_fwd"): {"k", "v", "beta", "A", "g", *SEQUENCES},
    (_RULE, "chunk_bwd_dv_local"): {"q", "k", "g", "do", "scale", *SEQUENCES},
    (_RULE, "chunk_gated_delta_rule_bwd_dhu"): {
        "q", "k", "w", "do", "dv", "g", "h0", "dht", "scale", *SEQUENCES,
    },
    ("fla.ops.cp.chunk_fwd", "chunk_cp_fwd_h"): {
        "k", "w", "u", "hm", "g", "cu_seqlens", "chunk_size", "multi_seqs",
    },
}  # fmt: skip


def why_not_called_so(home_of_rule: str, called: Mapping[tuple[str, str], set[str]]) -> str | None:
    """Which of these functions cannot be called with its arguments by name; None if all can.

    ``home_of_rule``: the module that imports them, and has ``RCP_LN2`` beside them.
    """
    for (home, name), wanted in called.items():
        try:
            module = import_module(home)
        except Exception as error:  # what fla needs may be missing or broken in any way
            why = f"{home} cannot be imported ({type(error).__name__}: {error})"
            return f"flash-linear-attention: {why}"
        function = getattr(module, name, None)
        if function is None:
            return f"flash-linear-attention: {home} has no {name}"
        arguments = getattr(function, "arg_names", None)  # of a Triton kernel
        if arguments is None:
            arguments = inspect.signature(function).parameters
        missing = ", ".join(sorted(wanted.difference(arguments)))
        if missing:
            return f"flash-linear-attention: {name} of {home} has no argument {missing}"
    if not hasattr(import_module(home_of_rule), "RCP_LN2"):
        return f"flash-linear-attention: {home_of_rule} has no RCP_LN2"
    return None


@cache
def why_not_callable() -> str | None:
    """Which function of the installed fla cannot be called as in this package; None if all can."""
    return why_not_called_so(_RULE, _CALLED)


def stages() -> Any:
    """fla's module with the stages of the gated delta rule."""
    return import_module(_RULE)


def boundaries_of(documents: Documents | None) -> Boundaries:
    if documents is None:
        return {"cu_seqlens": None, "chunk_indices": None}
    return {"cu_seqlens": documents.cu_seqlens, "chunk_indices": documents.chunks(CHUNK).indices}


class FlaRule(Rule):
    """A rule in fla's kernels, for bf16 or fp16: ``backend="fla"``."""

    name = "fla"
    reads_boundaries: ClassVar[bool] = False  # on the host, in its kernels' wrappers


class FlaForward(RuleForward):
    def __init__(self, rule: Any, inputs: Any, documents: Documents | None) -> None:
        super().__init__(rule, inputs, documents)
        if rule.reads_boundaries and documents is not None and not documents.known:
            raise NotImplementedError(
                f"{type(rule).__name__} reads the documents' boundaries on the host, and those in "
                f"fixed buffers are known on the device alone. Use backend='reference', or pass "
                f"ordinary packed_seq_params and leave this layer out of the graph."
            )
        self._boundaries = boundaries_of(documents)

    def _output(self, o: Tensor, last: Tensor | None, *saved: Tensor) -> RuleOutput:
        # The boundaries hold chunk indices, which would otherwise be built again on the host.
        return RuleOutput(in_rows(o, self._rows), last, Saved(saved, self._boundaries))

    def _maps(self, k: Tensor, w: Tensor, u: Tensor, **g: Tensor) -> StateMap:
        """The state maps of chunks that write ``u - w S``; ``g``: its sums, or ``gk``."""
        from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h

        parts = parts_of(self._inputs, self._documents)
        # [local | through] of every part: the summaries that fla's own context parallelism sends.
        (H, V), K, P = u.shape[2:], k.shape[-1], len(parts.offsets) - 1
        maps = u.new_empty(P, H, K, V + K, dtype=torch.float32)
        rows = {name: x.flatten(0, 1)[None] for name, x in {"k": k, "w": w, "u": u, **g}.items()}
        chunk_cp_fwd_h(**rows, hm=maps, cu_seqlens=parts.offsets, chunk_size=CHUNK, multi_seqs=True)
        local, through = (x.contiguous() for x in maps.split([V, K], dim=-1))
        return StateMap(*compose(local, through, parts))


class FlaBackward(RuleBackward):
    def __init__(
        self, rule: Any, d_o: Tensor, inputs: Any, saved: Saved, documents: Documents | None
    ) -> None:
        super().__init__(rule, d_o, inputs, saved, documents)
        self._boundaries = saved.plan

    def _some_states(self, K: int) -> Tensor:
        """fla computes the gradient of initial states only if it gets some; it reads no values."""
        B, _, H, V = self._d_o.shape
        N = B if self._documents is None else len(self._documents.cu_seqlens) - 1
        return self._d_o.new_empty(N, H, K, V, dtype=torch.float32)


def parts_of(inputs: Any, documents: Documents | None) -> Parts:
    """The parts whose maps fla computes. Its kernel counts the elements of a part in 32 bits."""
    (rows, tokens, H, V), K = inputs.v.shape, inputs.k.shape[-1]
    longest = 2**31 // (H * max(K, V)) // CHUNK * CHUNK
    if documents is None:
        documents = documents_of_rows((rows, tokens), inputs.v.device)
    if documents.known:
        return Parts.of(
            documents, ("by length", H, longest), lambda x: cut_by_length(x, H, longest)
        )
    if tokens > longest:
        raise NotImplementedError(
            f"states enter documents in fixed buffers of at most {longest} tokens per rank "
            f"with backend='fla' and {H} value heads, not {tokens}; use backend='flash_qla' or "
            f"linear_cp_mode='headwise'."
        )
    return Parts.of(documents, "uncut")
