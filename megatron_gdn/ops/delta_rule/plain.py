"""Linear-attention rules in chunks, in plain torch, for any device, dtype and head dim.

Each mixer's rule is a subclass of :class:`PlainRule` that makes
:class:`.chunk_math.Values` of its inputs. The backward runs the forward again under
autograd, one group of chunks at a time, so no pass keeps a tensor ``[T, C]``. Every
reduction has a fixed order, so results repeat bit for bit.

If an input of a token, except q, is NaN or inf, the head's outputs are NaN from this
token on; outputs of earlier tokens keep their bits. A log-decay may be -inf. If
products of finite numbers overflow in a chunk, earlier outputs of the chunk and all
gradients of the sequence may change.

C is the number of tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import gradients
from ..documents import documents_of_rows
from ..rules.base import (
    Bits,
    Gradients,
    Inputs,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    Saved,
    in_rows,
)
from ..rules.chunk_table import CHUNK, ChunkGroup, ChunkTable
from ..state_maps.state_map import StateMap
from ..switches import full_fp32_matmul
from .base import RuleGrads, RuleInputs
from .chunk_math import Values, run_group


class _ChunkedInputs:
    """The rule's inputs of ``stage``, a forward or backward, cut into groups of
    chunks."""

    def __init__(
        self, stage: PlainForward | PlainBackward, one_chunk_groups: bool = False
    ) -> None:
        """``one_chunk_groups``: let groups have one chunk on a CPU, so products have
        one shape."""
        rule = stage.rule
        self.inputs = stage.inputs
        documents = stage.documents
        k, v = self.inputs.k, self.inputs.v
        self.values = rule.values
        self.wide = torch.promote_types(v.dtype, torch.float32)
        if documents is None:
            documents = documents_of_rows(stage.rows, v.device)
        self.table = ChunkTable.of(
            documents, rule.chunk_size, v.shape[2], one_chunk_groups
        )
        self.shape = (self.table.sequences, v.shape[2], k.shape[3], v.shape[3])

    def of(self, group: ChunkGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The group's chunks ``[n heads, C, ...]`` of each tensor
        ``[B, T, heads, ...]``."""
        return [
            self.table.to_chunks(x, group, self.wide).flatten(0, 1) for x in tensors
        ]

    def values_of(self, group: ChunkGroup) -> Values:
        return self.values(self.inputs._make(self.of(group, self.inputs)))

    def state(self, states: Tensor | None) -> Tensor:
        """``states`` as a contiguous tensor ``[N, H, K, V]``; zeros for None."""
        if states is None:
            return self.inputs.v.new_zeros(self.shape, dtype=self.wide)
        return states.to(self.wide).reshape(self.shape).contiguous()

    def run(
        self, group: ChunkGroup, *chunks_and_states: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        *chunks, carried, initial = chunks_and_states
        values = self.values(self.inputs._make(chunks))
        return run_group(group, values, carried, initial)

    def walk(
        self, groups: Sequence[ChunkGroup], initial: Tensor, extra_columns: int = 0
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Final states, and the state before each group and after the last group.

        No token writes a value to the last ``extra_columns`` columns of the states.
        """
        carried: list[Tensor | None] = [None]
        final = initial.clone()
        for group in groups:
            x = self.values_of(group)
            if extra_columns:  # columns to which no token writes a value
                x = x._replace(u=F.pad(x.u, (0, extra_columns)))
            first = group.taken(initial)
            _, after, ended = run_group(group, x, carried[-1], first, output=False)
            group.put(final, ended)
            carried.append(after)
        return final, carried


class PlainForward(RuleForward):
    """The forward of :class:`PlainRule`, one group of chunks at a time."""

    @torch.no_grad()
    def state_map(self) -> StateMap:
        """``local``: final states from zeros. ``through``: final states from I without
        writes of v.

        If the rule erases nothing, ``through`` is diagonal, so one column of ones
        replaces I.
        """
        chunks = _ChunkedInputs(self, self.rule.bits is Bits.ON_GRID)
        initial = chunks.state(None)
        N, H, K, V = chunks.shape
        extra_columns = K if self.rule.erases else 1
        kind = {"dtype": initial.dtype, "device": initial.device}
        if self.rule.erases:
            enters = torch.eye(K, **kind)
        else:
            enters = torch.ones(K, 1, **kind)
        enters = enters.expand(N, H, K, extra_columns)
        with full_fp32_matmul(initial.device.type):
            wide = torch.cat([initial, enters], dim=-1)
            final, _ = chunks.walk(chunks.table.groups, wide, extra_columns)
        local, through = final.split([V, extra_columns], dim=-1)
        return StateMap(local.contiguous(), through.contiguous())

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        chunks = _ChunkedInputs(self, self.rule.bits is Bits.ON_GRID)
        like = self.inputs.v
        table = chunks.table
        entering = chunks.state(initial)
        walks = final or not table.one_chunk_per_sequence
        rows = table.rows_like(like)
        carried = None
        if walks:
            leaving = entering.clone()
        else:
            leaving = entering
        with full_fp32_matmul(like.device.type):
            for group in table.groups:
                o, carried, ended = run_group(
                    group,
                    chunks.values_of(group),
                    carried,
                    group.taken(entering),
                    pass_states=walks,
                    set_aside=True,
                )
                if walks:
                    group.put(leaving, ended)
                assert o is not None
                table.put(rows, group, o)
                del o
        o = in_rows(table.to_tokens(rows, like), self.rows)
        return RuleOutput(o, leaving if final else None, Saved())


class PlainBackward(RuleBackward):
    """The backward of :class:`PlainRule`, which runs each group of chunks again."""

    def d_initial(self) -> Tensor:
        return self._run(None, None, of_inputs=False)[1]

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        return self._run(initial, d_final)[0]

    def run_to_states(
        self, initial: Tensor | None, d_final: Tensor | None, maps: object
    ) -> tuple[Gradients, Tensor]:
        """Gradients of the inputs and of the initial states; ``maps`` is not used."""
        return self._run(initial, d_final)

    @torch.no_grad()
    def _run(
        self, initial: Tensor | None, d_final: Tensor | None, of_inputs: bool = True
    ) -> tuple[Gradients, Tensor]:
        """Gradients of the inputs (unless ``of_inputs`` is False) and of the initial
        states."""
        chunks = _ChunkedInputs(self)
        inputs = self.inputs if of_inputs else ()
        table = chunks.table
        entering = chunks.state(initial)
        rows = [table.rows_like(x) for x in inputs]
        d_leaving = chunks.state(d_final)
        d_entering = d_leaving.clone()
        d_carried = torch.zeros_like(d_leaving[0])
        with full_fp32_matmul(self.d_o.device.type):
            starts: list[Tensor | None] = [d_carried] * len(table.groups)
            starts[0] = None
            if of_inputs:
                starts = chunks.walk(table.groups[:-1], entering)[1]
            for group in reversed(table.groups):
                constants = chunks.of(group, self.inputs)
                leaves = ()
                if of_inputs:
                    constants, leaves = (), constants
                *grads, d_carried, d_first = gradients(
                    partial(chunks.run, group, *constants),
                    (*leaves, starts.pop(), group.taken(entering)),
                    (
                        chunks.of(group, [self.d_o])[0],
                        d_carried,
                        group.taken(d_leaving, ends=True),
                    ),
                )
                group.put(d_entering, d_first, begins=True)
                for to, gradient in zip(rows, grads, strict=True):
                    table.put(to, group, gradient)
                del constants, leaves, grads
        if not of_inputs:
            return None, d_entering
        found = (
            table.to_tokens(to, like) for to, like in zip(rows, inputs, strict=True)
        )
        return self.rule.grads(*(in_rows(x, self.rows) for x in found)), d_entering


class PlainRule(Rule):
    """The gated delta rule of ``backend="reference"``, with a decay per head or per
    channel."""

    name = "reference"
    # the least promise; the constructor's ``bits`` may promise more
    bits = Bits.DETERMINISTIC
    backward_reads = frozenset(RuleInputs._fields)
    forward = PlainForward
    backward = PlainBackward
    grads: ClassVar[Callable[..., Gradients]] = RuleGrads
    erases = True
    chunk_size = CHUNK
    scale: float | None = None  # factor of the output; None: 1 / sqrt(K)

    def __init__(
        self,
        bits: Bits = Bits.FREE,
        chunk_size: int = CHUNK,
        scale: float | None = None,
    ) -> None:
        self.bits = max(bits, self.bits)
        self.chunk_size = chunk_size
        self.scale = scale

    @classmethod
    def of(cls, sizes: object, bits: Bits) -> Self:
        return cls(bits)

    def values(self, chunks: Inputs) -> Values:
        """The rows that :func:`.chunk_math.run_group` reads, from the inputs' chunks
        ``[n, C, ...]``."""
        q, k, v, g, beta = chunks
        if self.scale is None:
            scale = k.shape[-1] ** -0.5
        else:
            scale = self.scale
        return Values(q * scale, k, k, beta[..., None] * v, g, beta)
