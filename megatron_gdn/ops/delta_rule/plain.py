"""Linear-attention rules in chunks, in plain torch, for any device, dtype and head dim.

Each mixer's rule is a subclass of :class:`PlainRule`; its method ``values`` computes
:class:`.chunk_math.ChunkValues` from its inputs. The backward runs the forward again
under autograd, one group of chunks at a time, so no pass keeps a tensor ``[T, C]``.
Every reduction has a fixed order, so results repeat bit for bit.

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
    SavedForBackward,
    in_rows,
)
from ..rules.chunk_table import CHUNK, ChunkGroup, ChunkTable
from ..state_maps.state_map import StateMap
from ..switches import full_fp32_matmul
from .base import RuleGrads, RuleInputs
from .chunk_math import ChunkValues, run_group


class _ChunkedInputs:
    """The inputs of one forward or backward, cut into groups of chunks."""

    def __init__(
        self, call: PlainForward | PlainBackward, one_chunk_groups: bool = False
    ) -> None:
        """Keep the inputs of ``call`` and make the table of their chunks.

        With ``one_chunk_groups`` a group on a CPU has one chunk, since a CPU may round
        a chunk's products otherwise beside other chunks (:meth:`.ChunkTable.of`).
        """
        rule = call.rule
        self.inputs = call.inputs
        documents = call.documents
        k, v = self.inputs.k, self.inputs.v
        self.to_values = rule.values
        self.dtype = torch.promote_types(v.dtype, torch.float32)
        if documents is None:
            documents = documents_of_rows(call.batch_shape, v.device)
        self.table = ChunkTable.of(
            documents, rule.chunk_size, v.shape[2], one_chunk_groups
        )
        # [N, H, K, V]
        self.state_shape = (
            self.table.sequence_count,
            v.shape[2],
            k.shape[3],
            v.shape[3],
        )

    def to_chunks(self, group: ChunkGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The group's chunks ``[n heads, C, ...]`` of each tensor
        ``[B, T, heads, ...]``."""
        return [
            self.table.to_chunks(x, group, self.dtype).flatten(0, 1) for x in tensors
        ]

    def values_of(self, group: ChunkGroup) -> ChunkValues:
        return self.to_values(self.inputs._make(self.to_chunks(group, self.inputs)))

    def states_or_zeros(self, states: Tensor | None) -> Tensor:
        """``states`` as a contiguous tensor ``[N, H, K, V]``; zeros for None."""
        if states is None:
            return self.inputs.v.new_zeros(self.state_shape, dtype=self.dtype)
        return states.to(self.dtype).reshape(self.state_shape).contiguous()

    def run_group(
        self, group: ChunkGroup, *chunks_and_states: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The result of :func:`.chunk_math.run_group`. ``chunks_and_states`` are the
        chunks of every input, then the carried state and the initial states."""
        *chunks, carried, initial = chunks_and_states
        values = self.to_values(self.inputs._make(chunks))
        return run_group(group, values, carried, initial)

    def pass_states(
        self, groups: Sequence[ChunkGroup], initial: Tensor, extra_columns: int = 0
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The final states, and the state before each group and after the last one.

        ``initial`` is ``[N, H, K, V + extra_columns]``. Tokens write no value to the
        extra columns.
        """
        carried: list[Tensor | None] = [None]
        final = initial.clone()
        for group in groups:
            x = self.values_of(group)
            if extra_columns:
                x = x._replace(u=F.pad(x.u, (0, extra_columns)))
            begins_from = group.select_states(initial)
            _, after, ended = run_group(
                group, x, carried[-1], begins_from, output=False
            )
            group.write_states(final, ended)
            carried.append(after)
        return final, carried


class PlainForward(RuleForward):
    """The forward of :class:`PlainRule`, one group of chunks at a time."""

    @torch.no_grad()
    def state_map(self) -> StateMap:
        """The state map, from one pass of states with extra columns.

        The first V columns start from zeros and get the tokens' values: they end as
        ``local``. The extra columns start from the identity and get no values: they end
        as ``through``. If the rule erases nothing, ``through`` is diagonal, and one
        column of ones takes the place of the identity.
        """
        chunks = _ChunkedInputs(self, self.rule.bits is Bits.ON_GRID)
        zeros = chunks.states_or_zeros(None)
        N, H, K, V = chunks.state_shape
        if self.rule.erases:
            start = torch.eye(K, dtype=zeros.dtype, device=zeros.device)
        else:
            start = torch.ones(K, 1, dtype=zeros.dtype, device=zeros.device)
        extra_columns = start.shape[1]
        start = start.expand(N, H, K, extra_columns)
        with full_fp32_matmul(zeros.device.type):
            initial = torch.cat([zeros, start], dim=-1)
            final, _ = chunks.pass_states(chunks.table.groups, initial, extra_columns)
        local, through = final.split([V, extra_columns], dim=-1)
        return StateMap(local.contiguous(), through.contiguous())

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output and the final states, one group of chunks after another, from
        ``initial`` states ``[N, H, K, V]`` (None: zeros). ``keep`` is not read: the
        backward gets no tensors, since it runs the groups again."""
        chunks = _ChunkedInputs(self, self.rule.bits is Bits.ON_GRID)
        v = self.inputs.v
        table = chunks.table
        initial = chunks.states_or_zeros(initial)
        # no state is passed on if each chunk is a whole sequence
        pass_states = final or not table.one_chunk_per_sequence
        rows = table.new_rows(v)
        carried = None
        if pass_states:
            final_states = initial.clone()
        else:
            final_states = initial
        with full_fp32_matmul(v.device.type):
            for group in table.groups:
                o, carried, ended = run_group(
                    group,
                    chunks.values_of(group),
                    carried,
                    group.select_states(initial),
                    pass_states=pass_states,
                    isolate_nonfinite=True,
                )
                if pass_states:
                    group.write_states(final_states, ended)
                assert o is not None
                table.write_head_chunks(rows, group, o)
                del o
        o = in_rows(table.to_tokens(rows, v), self.batch_shape)
        return RuleOutput(o, final_states if final else None, SavedForBackward())


class PlainBackward(RuleBackward):
    """The backward of :class:`PlainRule`, which runs each group of chunks again."""

    def d_initial(self) -> Tensor:
        return self._run(None, None, of_inputs=False)[1]

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        """The gradients of the inputs; ``initial`` and ``d_final`` are ``[N, H, K, V]``
        or None (zeros)."""
        return self._run(initial, d_final)[0]

    def run_with_d_initial(
        self, initial: Tensor | None, d_final: Tensor | None, maps: object
    ) -> tuple[Gradients, Tensor]:
        """The gradients of the inputs and of the initial states; ``maps`` is not
        called, since one pass gives both."""
        return self._run(initial, d_final)

    @torch.no_grad()
    def _run(
        self, initial: Tensor | None, d_final: Tensor | None, of_inputs: bool = True
    ) -> tuple[Gradients, Tensor]:
        """The gradients of the inputs and of the initial states.

        Without ``of_inputs`` the first result is None. Then the states before groups
        are not needed: the gradient of a state does not depend on states, since the
        rule is affine in them.
        """
        chunks = _ChunkedInputs(self)
        inputs = self.inputs if of_inputs else ()
        table = chunks.table
        initial = chunks.states_or_zeros(initial)
        d_rows = [table.new_rows(x) for x in inputs]
        d_final = chunks.states_or_zeros(d_final)
        d_initial = d_final.clone()
        d_carried = torch.zeros_like(d_final[0])
        with full_fp32_matmul(self.d_o.device.type):
            # The state before each group. Without ``of_inputs`` zeros stand for states,
            # which are not needed.
            carried: list[Tensor | None] = [d_carried] * len(table.groups)
            if of_inputs:
                _, carried = chunks.pass_states(table.groups[:-1], initial)
            for group in reversed(table.groups):
                input_chunks = chunks.to_chunks(group, self.inputs)
                run = partial(chunks.run_group, group)
                differentiated: list[Tensor | None] = []
                if of_inputs:
                    differentiated += input_chunks
                else:
                    run = partial(run, *input_chunks)
                differentiated += [carried.pop(), group.select_states(initial)]
                d_outputs = (
                    chunks.to_chunks(group, [self.d_o])[0],
                    d_carried,
                    group.select_states(d_final, ends=True),
                )
                # d_carried: of the state before the group; d_begins: of the initial
                # states of the sequences that begin in the group
                *d_inputs, d_carried, d_begins = gradients(
                    run, differentiated, d_outputs
                )
                group.write_states(d_initial, d_begins, begins=True)
                for rows, gradient in zip(d_rows, d_inputs, strict=True):
                    table.write_head_chunks(rows, group, gradient)
                del input_chunks, run, differentiated, d_outputs, d_inputs
        if not of_inputs:
            return None, d_initial
        of_tokens = []
        for rows, like in zip(d_rows, inputs, strict=True):
            of_tokens.append(in_rows(table.to_tokens(rows, like), self.batch_shape))
        return self.rule.gradients_class(*of_tokens), d_initial


class PlainRule(Rule):
    """The gated delta rule of ``backend="reference"``, with a decay per head or per
    channel."""

    name = "reference"
    # this rule promises no less; the constructor's ``bits`` may promise more
    bits = Bits.DETERMINISTIC
    backward_reads = frozenset(RuleInputs._fields)
    forward_class = PlainForward
    backward_class = PlainBackward
    # the NamedTuple class in which a backward returns the gradients of the inputs
    gradients_class: ClassVar[Callable[..., Gradients]] = RuleGrads
    erases = True  # whether a token erases a value from the state before it writes
    chunk_size = CHUNK
    scale: float | None = None  # factor of the output; None: 1 / sqrt(K)

    def __init__(
        self,
        bits: Bits = Bits.FREE,
        chunk_size: int = CHUNK,
        scale: float | None = None,
    ) -> None:
        """``bits`` is raised to ``DETERMINISTIC``, which this rule always promises.
        ``chunk_size`` is in tokens."""
        self.bits = max(bits, self.bits)
        self.chunk_size = chunk_size
        self.scale = scale

    @classmethod
    def of(cls, sizes: object, bits: Bits) -> Self:
        return cls(bits)

    def values(self, chunks: Inputs) -> ChunkValues:
        """The values for :func:`.chunk_math.run_group`.

        ``chunks`` are the inputs' chunks ``[n heads, C, ...]``.
        """
        q, k, v, g, beta = chunks
        return ChunkValues(self.scaled(q), k, k, beta[..., None] * v, g, beta)

    def scaled(self, q: Tensor) -> Tensor:
        """``q [..., K]`` times the factor of the output."""
        if self.scale is None:
            return q * q.shape[-1] ** -0.5
        return q * self.scale
