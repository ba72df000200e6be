"""The functions of flash-linear-attention (fla) that are called here, checked before it is chosen.

Most of them lie beneath fla's public ones and may change with any release. Importing fla takes
seconds and needs triton, so nothing here runs before a GPU backend is considered.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..documents import Documents
from ..host_tables import cached_by_stream
from ..state_maps.parts import CHUNK, Parts, parts_by_length, uncut_parts
from ..static_documents import StaticDocuments

_RULE = "fla.ops.gated_delta_rule"
_CHUNK = f"{_RULE}.chunk"
SEQUENCES = {"cu_seqlens", "chunk_indices"}

# Module, function: the arguments that are passed by name.
_CALLED = {
    (_CHUNK, "chunk_gated_delta_rule_fwd"): {
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", *SEQUENCES,
    },
    (_CHUNK, "chunk_gated_delta_rule_bwd"): {
        "q", "k", "v", "g", "beta", "A", "scale", "initial_state", "do", "dht", *SEQUENCES,
    },
    (_CHUNK, "chunk_local_cumsum"): {"g", "chunk_size", "scale", *SEQUENCES},
    (_CHUNK, "chunk_gated_delta_rule_fwd_intra"): {"k", "v", "g", "beta", *SEQUENCES},
    (_CHUNK, "chunk_gated_delta_rule_fwd_h"): {"k", "w", "u", "g", "initial_state", *SEQUENCES},
    (_CHUNK, "chunk_fwd_o"): {"q", "k", "v", "h", "g", "scale", *SEQUENCES},
    (_CHUNK, "recompute_w_u_fwd"): {"k", "v", "beta", "A", "g", *SEQUENCES},
    (_CHUNK, "chunk_bwd_dv_local"): {"q", "k", "g", "do", "scale", *SEQUENCES},
    (_CHUNK, "chunk_gated_delta_rule_bwd_dhu"): {
        "q", "k", "w", "do", "dv", "g", "h0", "dht", "scale", *SEQUENCES,
    },
    ("fla.ops.cp.chunk_fwd", "chunk_cp_fwd_h"): {
        "k", "w", "u", "hm", "g", "cu_seqlens", "chunk_size", "multi_seqs",
    },
    ("fla.ops.utils.index", "prepare_chunk_indices"): {"cu_seqlens_cpu"},
}  # fmt: skip


def why_not_called_so(home_of_rule: str, called: Mapping[tuple[str, str], set[str]]) -> str | None:
    """Which of these functions cannot be called with its arguments by name; None if all can.

    Args:
        home_of_rule: the module that imports them, and has ``RCP_LN2`` beside them.
        called: (module, function) to the arguments that are passed by name.
    """
    for (home, name), wanted in called.items():
        try:
            module = import_module(home)
        except Exception as error:  # what fla needs may be missing or broken in any way
            return f"{home} cannot be imported ({type(error).__name__}: {error})"
        function = getattr(module, name, None)
        if function is None:
            return f"{home} has no {name}"
        missing = sorted(wanted - _arguments(function))
        if missing:
            return f"{name} of {home} has no argument {', '.join(missing)}"
    if not hasattr(import_module(home_of_rule), "RCP_LN2"):
        return f"{home_of_rule} has no RCP_LN2"
    return None


def _arguments(function: Any) -> set[str]:
    """Names of the arguments of a function or a Triton kernel."""
    names = getattr(function, "arg_names", None)
    return set(inspect.signature(function).parameters if names is None else names)


def checked_module(home_of_rule: str, why_not: str | None) -> ModuleType:
    """The module ``home_of_rule``.

    Args:
        why_not: what :func:`why_not_called_so` returned.

    Raises:
        ImportError: ``why_not`` is not None.
    """
    if why_not is not None:
        raise ImportError(f"flash-linear-attention is not the one that is known here: {why_not}.")
    return import_module(home_of_rule)


@cache
def why_not_callable() -> str | None:
    """Which function of the installed fla cannot be called as in this package; None if all can."""
    return why_not_called_so(_CHUNK, _CALLED)


def stages() -> ModuleType:
    """fla's module with the stages of the rule, which were checked when the rule was chosen.

    Raises:
        ImportError: the installed fla's functions cannot be called as this package calls them.
    """
    return checked_module(_CHUNK, why_not_callable())


def boundaries_of(documents: Documents | None) -> dict[str, Tensor | None]:
    if documents is None:
        return {"cu_seqlens": None, "chunk_indices": None}
    if isinstance(documents, StaticDocuments):
        # fla caches tables by the identity of the offsets tensor, and this one changes in place. A
        # new alias has no older tables. It lives as long as one forward and backward.
        return {
            "cu_seqlens": documents.cu_seqlens.view(-1),
            "chunk_indices": documents.chunks(CHUNK).indices,
        }
    from fla.ops.utils.index import prepare_chunk_indices

    # fla caches by tensor identity; Documents keeps both tensors, so all layers hit.
    indices = prepare_chunk_indices(
        documents.cu_seqlens, CHUNK, cu_seqlens_cpu=documents.cu_seqlens_cpu
    )
    return {"cu_seqlens": documents.cu_seqlens, "chunk_indices": indices}


@cached_by_stream(64)
def _parts(
    sequences: tuple[int, ...], value_heads: int, longest: int, device: torch.device
) -> Parts:
    return Parts.build(sequences, parts_by_length(sequences, value_heads, longest), device)


def parts_of(inputs: Any, documents: Documents | None) -> Parts:
    """The parts whose maps fla computes. Its kernel counts the elements of a part in 32 bits.

    Raises:
        NotImplementedError: fixed buffers, whose documents are not cut, of too many tokens for
            that.
    """
    (rows, tokens, H, V), K = inputs.v.shape, inputs.k.shape[-1]
    longest = 2**31 // (H * max(K, V)) // CHUNK * CHUNK
    if isinstance(documents, StaticDocuments):
        if tokens > longest:
            raise NotImplementedError(
                f"states enter documents in fixed buffers of at most {longest} tokens per rank "
                f"with backend='fla' and {H} value heads, not {tokens}; use backend='flash_qla' or "
                f"linear_cp_mode='headwise'."
            )
        return uncut_parts(documents)
    if documents is None:
        sequences = tuple(row * tokens for row in range(rows + 1))
    else:
        sequences = documents.filled_offsets
    return _parts(sequences, H, longest, inputs.v.device)
