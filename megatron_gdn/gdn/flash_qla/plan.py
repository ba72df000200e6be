"""How FlashQLA cuts the sequences of a batch into segments that run side by side.

For documents in fixed buffers, the host knows only the largest number of segments and
chunks. So the cuts of such a sequence depend only on its length and on the number of
heads. Kernels are launched for the largest numbers, and a thread block without tokens
writes nothing.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ...ops.documents import Documents, documents_of_rows
from ...ops.host_tables import cached_by_stream
from ...ops.state_maps.segments import (
    CHUNK,
    Segments,
    cut_at,
    cut_by_length,
    largest_number_of_cuts,
    one_segment_per_sequence,
)
from .builds import compile_once_per_machine, multiprocessors
from .fences import fence_bulk_stores
from .hopper import HopperKernels

# the functions of FlashQLA's module ``chunk`` that this package calls
_FLASH_QLA_FUNCTIONS = (
    "build_cp_context",
    "chunk_local_cumsum",
    "kkt_solve",
    "get_warmup_chunks_bidi",
    "fused_gdr_h",
    "correct_initial_states",
    "correct_terminal_states",
    "fused_gdr_fwd",
    "fused_gdr_dh",
    "fused_gdr_bwd",
)
# The functions whose kernels lack fences, and the tilelang kernel of each function.
KERNELS_WITHOUT_FENCES = {
    "kkt_solve": "tilelang_kkt_solve",
    "fused_gdr_fwd": "tilelang_fused_chunk_gdr_fwd",
    "fused_gdr_bwd": "tilelang_fused_chunk_gdr_bwd",
}


@cache
def kernels() -> Any:
    """FlashQLA's functions, each of which launches one kernel: :class:`HopperKernels`
    on Hopper, on other GPUs FlashQLA's own module."""
    chunk = flash_qla_module()
    if _is_for_hopper(chunk):
        return HopperKernels(chunk, _modules_of_kernels(chunk))
    return chunk


def _is_for_hopper(chunk: ModuleType) -> bool:
    return ".hopper." in chunk.fused_gdr_fwd.__module__


def _modules_of_kernels(chunk: ModuleType) -> dict[str, ModuleType]:
    """FlashQLA's module that defines each function, by the function's name."""
    return {
        name: sys.modules[getattr(chunk, name).__module__]
        for name in _FLASH_QLA_FUNCTIONS
    }


@cache
def flash_qla_module() -> ModuleType:
    """FlashQLA's own module, which has the kernels for this GPU's architecture.

    On Hopper its kernels get the fences that they lack (:mod:`.fences`). Every kernel
    is compiled once per machine (:mod:`.builds`).
    """
    from flash_qla.ops.gated_delta_rule import chunk  # pyright: ignore[reportMissingImports]

    try:
        modules = _modules_of_kernels(chunk)
        if _is_for_hopper(chunk):
            fence_bulk_stores(
                *(
                    (modules[name], kernel)
                    for name, kernel in KERNELS_WITHOUT_FENCES.items()
                )
            )
    except (AttributeError, TypeError, ImportError) as error:
        raise ImportError(
            f"this flash_qla or tilelang is not known here ({error}); the fused mixer "
            "knows flash-qla 0.1.3 and tilelang 0.1.15. Install these versions, or "
            "choose backend='fla'."
        ) from error
    from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

    values = [value for module in modules.values() for value in vars(module).values()]
    compile_once_per_machine(
        list({id(x): x for x in values if isinstance(x, JITImpl)}.values())
    )
    return chunk


def _cut_by_cost(documents: Documents, value_heads: int) -> list[int] | None:
    """Offsets of segments by FlashQLA's cost model for ``value_heads``; None if no
    sequence is cut.

    During FlashQLA's function the CPU is the default device, so its tensors are on the
    host, as ``documents.starts`` is.
    """
    with torch.device("cpu"):
        context = kernels().build_cp_context(
            documents.starts,
            enable_intra=True,
            num_v_heads=value_heads,
            chunk_size=CHUNK,
            is_train=True,
        )
    if context.is_intra:
        return context.intra_cp_cu_seqlens.tolist()
    return None


@cached_by_stream(64)
def plan_of_rows(
    rows: int, tokens: int, value_heads: int, device: torch.device
) -> Segments | None:
    """The segments of a batch without initial states, of ``rows`` rows with ``tokens``
    tokens each; None if there are several rows and none is cut.

    Several rows are cut only if rows times heads are fewer than the GPU's
    multiprocessors.
    """
    documents = documents_of_rows((rows, tokens), device)
    rows_fill_gpu = rows * value_heads >= multiprocessors()
    if rows > 1 and (rows_fill_gpu or _cut_by_cost(documents, value_heads) is None):
        return None
    return plan_of(documents, value_heads, batch_invariant=False, with_states=False)


def plan_of(
    documents: Documents, value_heads: int, batch_invariant: bool, with_states: bool
) -> Segments:
    """The segments of ``documents``, shared by all layers and their backward.

    If ``batch_invariant``, the cuts of a sequence depend only on its length and on the
    number of heads. ``with_states``: whether documents have initial states.
    """
    return documents.keep(_make_plan, value_heads, batch_invariant, with_states)


def _make_plan(
    documents: Documents, value_heads: int, batch_invariant: bool, with_states: bool
) -> Segments:
    """Compute :func:`plan_of`: by FlashQLA's cost model if the host knows the
    boundaries and ``batch_invariant`` is False, else by each sequence's length."""
    if documents.known_on_host and not batch_invariant:
        offsets = _cut_by_cost(documents, value_heads)
        if offsets is None:
            return plan_without_cuts(documents)
        segments = Segments.of(documents, cut_at, tuple(offsets))
        return _store_chunk_tables(segments, documents)
    if not documents.known_on_host:
        # In fixed buffers the host does not know the chains of segments, so sequences
        # with initial states must not be cut.
        if with_states:
            return plan_without_cuts(documents)
        if not batch_invariant and not largest_number_of_cuts(documents, value_heads):
            return plan_without_cuts(documents)
    segments = Segments.of(documents, cut_by_length, value_heads)
    return _store_chunk_tables(segments, documents)


def plan_without_cuts(documents: Documents) -> Segments:
    """The plan that cuts no sequence: each sequence is one segment."""
    return documents.keep(_make_plan_without_cuts)


def _make_plan_without_cuts(documents: Documents) -> Segments:
    """Compute :func:`plan_without_cuts`, with the tables that FlashQLA looks for."""
    return _store_chunk_tables(
        Segments.of(documents, one_segment_per_sequence), documents
    )


def _store_chunk_tables(segments: Segments, documents: Documents) -> Segments:
    """Attach tables of chunks to the offsets of sequences and of segments, where
    FlashQLA looks for them before it makes its own; return ``segments``."""
    if not documents.known_on_host and documents.total_tokens < CHUNK:
        # A thread block without tokens reads the buffer's last 64 tokens, so the buffer
        # needs 64.
        raise NotImplementedError(
            f"flash_qla takes documents in fixed buffers of at least {CHUNK} tokens "
            f"per rank, not {documents.total_tokens}; use backend='fla' or larger "
            "buffers."
        )
    for offsets, places in (
        (segments.sequence_offsets, documents.chunks(CHUNK)),
        (segments.offsets, segments.chunk_places),
    ):
        # FlashQLA's ``prepare_varlen_metadata`` stores the same tuple in this
        # attribute.
        table = CHUNK, places.offsets, len(places.indices), places.indices
        offsets._flash_qla_prepared_varlen = table  # pyright: ignore[reportAttributeAccessIssue]
    return segments
