"""FlashQLA's stages, and its cut of a batch's sequences into parts.

In fixed buffers the host knows only the largest number of parts and chunks, so a sequence is always
cut by its own length and the number of heads; a block without tokens writes nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...ops.documents import Documents, documents_of_rows
from ...ops.host_tables import cached_by_stream
from ...ops.state_maps.parts import Parts, cut_at, cut_by_length, most_cuts
from .builds import multiprocessors, watch_builds
from .fences import fence_bulk_stores
from .hopper import HopperStages

_STAGES = (
    "chunk_gated_delta_rule_fwd", "build_cp_context", "FlashQLACPContext", "cp_preprocess_bwd",
    "kkt_solve", "fused_gdr_h", "fused_gdr_dh", "fused_gdr_fwd", "fused_gdr_bwd",
    "get_warmup_chunks_bidi", "chunk_local_cumsum", "correct_initial_states", "CHUNK_SIZE",
)  # fmt: skip
# Stages whose kernels lack fences -> the function in the stage's module that tilelang compiles.
UNFENCED = {
    "kkt_solve": "tilelang_kkt_solve",
    "fused_gdr_fwd": "tilelang_fused_chunk_gdr_fwd",
    "fused_gdr_bwd": "tilelang_fused_chunk_gdr_bwd",
}


@cache
def stages() -> Any:
    """FlashQLA's stages: :class:`HopperStages` on Hopper, elsewhere FlashQLA's own module."""
    chunk = own_stages()
    homes = _homes(chunk)
    on_hopper = ".hopper." in homes["fused_gdr_fwd"].__name__
    return HopperStages(chunk, homes) if on_hopper else chunk


def _homes(chunk: ModuleType) -> dict[str, ModuleType]:
    """The modules of the stages that are functions or classes."""
    found = {name: getattr(getattr(chunk, name), "__module__", None) for name in _STAGES}
    return {name: sys.modules[home] for name, home in found.items() if home is not None}


@cache
def own_stages() -> ModuleType:
    """FlashQLA's own module of stages, which picked them for this architecture."""
    from flash_qla.ops.gated_delta_rule import chunk  # pyright: ignore[reportMissingImports]

    missing = [name for name in _STAGES if not hasattr(chunk, name)]
    if missing:
        raise ImportError(
            f"this flash_qla has no {', '.join(missing)}; the fused mixer knows flash-qla 0.1.3. "
            f"Install that, or choose backend='fla'."
        )
    homes = _homes(chunk)
    if all(".hopper." in homes[name].__name__ for name in UNFENCED):
        try:
            fence_bulk_stores(*((homes[name], kernel) for name, kernel in UNFENCED.items()))
        except (AttributeError, TypeError, ImportError) as error:
            raise ImportError(
                f"this flash_qla or tilelang compiles its kernels in a way that is not known here "
                f"({error}); the fused mixer knows flash-qla 0.1.3 and tilelang 0.1.15. Install "
                f"those, or choose backend='fla'."
            ) from error
    from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

    found = [x for home in homes.values() for x in vars(home).values() if isinstance(x, JITImpl)]
    watch_builds(list({id(x): x for x in found}.values()))
    return chunk


@dataclass(frozen=True, eq=False)
class Plan:
    """How one batch runs on one device."""

    context: Any  # FlashQLA's own description of it
    parts: Parts | None  # the same cut; None for uncut rows that run side by side

    @staticmethod
    def whole(parts: Parts) -> Plan:
        """The plan of sequences that are not cut."""
        return Plan(stages().FlashQLACPContext(cu_seqlens=parts.sequences), parts)

    @staticmethod
    def in_parts(parts: Parts) -> Plan:
        context = stages().FlashQLACPContext(
            is_intra=True, cu_seqlens=parts.sequences, intra_cp_cu_seqlens=parts.offsets,
            seq_map_r2c=parts.first, seq_map_c2r=parts.owner, ht_mask=parts.closes,
            ht_mask_bwd=parts.opens,
        )  # fmt: skip
        return Plan(context, parts)

    @property
    def cut(self) -> Parts:
        """The :attr:`parts` of a plan for states, which always has them."""
        assert self.parts is not None
        return self.parts

    @property
    def carrying(self) -> tuple[Tensor, Tensor, Tensor]:
        """``cu_seqlens``, ``cp_seq_map`` and ``raw_cu_seqlens`` of a forward with states."""
        return self.cut.offsets, self.cut.owner, self.cut.sequences

    def part(self, states: bool) -> str:
        """The plan's group of FlashQLA's kernels, by its name in ``megatron_gdn.warm_up``."""
        if states:
            return "states"
        if self.parts is None:
            return "rows"
        return "cut" if self.context.is_intra else "uncut"

    @property
    def part_offsets(self) -> Tensor | None:
        """The ``cu_seqlens`` of kernels that take each part as a sequence."""
        return None if self.parts is None else self.parts.offsets


def _cut_by_cost(documents: Documents, value_heads: int) -> list[int] | None:
    """FlashQLA's cut for the whole batch, by lengths and heads; None if it cuts no sequence."""
    with torch.device("cpu"):
        context = stages().build_cp_context(
            documents.cu_seqlens_cpu, enable_intra=True, num_v_heads=value_heads,
            chunk_size=stages().CHUNK_SIZE, is_train=True,
        )  # fmt: skip
    return context.intra_cp_cu_seqlens.tolist() if context.is_intra else None


@cached_by_stream(64)
def plan_of_rows(rows: int, tokens: int, value_heads: int, device: torch.device) -> Plan:
    """The plan of batch rows that start at zero.

    If rows times heads are fewer than multiprocessors, FlashQLA's cost model cuts the rows like
    documents; rows that it leaves whole run side by side.
    """
    documents = documents_of_rows((rows, tokens), device)
    full = rows * value_heads >= multiprocessors()
    if rows > 1 and (full or _cut_by_cost(documents, value_heads) is None):
        return Plan(stages().build_cp_context(None), None)
    return plan_of(documents, value_heads, False, False)


def plan_of(documents: Documents, value_heads: int, batch_invariant: bool, states: bool) -> Plan:
    """The plan of these documents, for every layer and the backward.

    ``batch_invariant``: a sequence is cut by its own length. ``states``: states enter the
    documents.
    """
    key = Plan, value_heads, batch_invariant, states
    return documents.plan(key, lambda: _plan_of(documents, *key[1:]))


def _plan_of(documents: Documents, value_heads: int, batch_invariant: bool, states: bool) -> Plan:
    if not documents.known and (
        states or not (batch_invariant or most_cuts(documents, value_heads))
    ):
        return plan_of_whole(documents)
    key, cut = ("by length", value_heads), cut_by_length
    if documents.known and not batch_invariant:
        offsets = _cut_by_cost(documents, value_heads)
        if offsets is None:
            return plan_of_whole(documents)
        key, cut = ("by cost", value_heads), lambda these, _: cut_at(these, offsets)
    # With batch_invariant also if no sequence is long enough to be cut: a short one always takes
    # the kernels that carry states between parts, as it would with a long one beside it.
    parts = Parts.of(documents, key, lambda these: cut(these, value_heads))
    return Plan.in_parts(_with_chunks(parts, documents))


def plan_of_whole(documents: Documents) -> Plan:
    """The plan of sequences that are not cut."""
    return documents.plan(
        (Plan, "whole"), lambda: Plan.whole(_with_chunks(Parts.of(documents, "whole"), documents))
    )


def _with_chunks(parts: Parts, documents: Documents) -> Parts:
    """The parts, with chunks stored on offsets; else FlashQLA would read these from the GPU."""
    size = stages().CHUNK_SIZE
    if not documents.known and documents.total_tokens < size:
        # A block without tokens looks at the 64 tokens before the end.
        raise NotImplementedError(
            f"flash_qla takes documents in fixed buffers of at least {size} tokens per rank, not "
            f"{documents.total_tokens}; use backend='fla' or larger buffers."
        )
    for offsets, places in (
        (parts.sequences, documents.chunks(size)), (parts.offsets, parts.places)
    ):  # fmt: skip
        # As FlashQLA's ``prepare_varlen_metadata`` stores it.
        made = size, places.offsets, len(places.indices), places.indices
        offsets._flash_qla_prepared_varlen = made  # pyright: ignore[reportAttributeAccessIssue]
    return parts
