"""The interface that a mixer implements to generate.

Legend: s tokens, t tokens of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...compat.observe import span
from ...ops.autograd import uncompiled
from ...ops.generation.memory import Memory, MemoryShape
from ...ops.parts import Parts
from ..arguments import require_causal
from ..micro_batch import MicroBatch, MicroBatches
from ..packing import resolve_packed_seq_params
from .dynamic import check_buffers, decode_requests, prefill_requests, refuse
from .static import mix_static

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


class GeneratingMixer:
    """A Megatron mixer that continues sequences from a :class:`...ops.generation.memory.Memory`."""

    config: Any
    pg_collection: Any
    tp_group: Any
    backend: str
    layer_number: int | None
    pp_layer_offset: int = 0  # layers on the pipeline stages before
    # Where Megatron's dynamic context may cut prompts: equal in all recurrent layers of a model.
    chunk_size: int = 128
    state_transposed: ClassVar[bool] = False  # Megatron stores this mixer's states as [H, V, K]
    dims: Any  # of this rank: the layout of a projection row, the state of its heads
    micro_batches: MicroBatches

    @property
    def conv_weight(self) -> Tensor:
        """``[C, 1, W]``, in the dtype and on the device of the projection's rows."""
        raise NotImplementedError

    def parts(self, rows: Tensor, batch: MicroBatch) -> Parts:
        """The parts of the mixer between its projections."""
        raise NotImplementedError

    def whole_parts(self, rows: Tensor) -> Parts:
        """The parts for whole sequences on this rank, rows ``[s, B, P]``."""
        return self.parts(rows, self.micro_batches.whole(rows.device, rows.dtype))

    @uncompiled  # one kernel after the other, from tables cached by value
    def generate(
        self,
        rows: Tensor,
        context: Any,
        attention_mask: Tensor | None,
        packed: PackedSeqParams | None,
    ) -> Tensor:
        """The next tokens' projection rows ``[s, B, P]`` to rows for out_proj, ``[s, B, H V]``.

        It updates the memory in Megatron's static or dynamic ``context``. Each rank has all tokens,
        also under sequence parallelism. Packed sequences, context parallelism and calls that want
        gradients are NotImplementedErrors; see also :mod:`.static` and :mod:`.dynamic`.
        """
        self._refuse_generation(rows, context)
        if not context.is_static_batching():
            if attention_mask is not None or packed is not None:
                raise NotImplementedError(
                    "a dynamic context says itself which tokens belong to which request; pass "
                    "neither an attention_mask nor packed_seq_params."
                )
            with span(self, "mixer"):
                return self._dynamic_step(rows, context)
        s, B = rows.shape[:2]
        with span(self, "mixer"):
            if packed is not None and resolve_packed_seq_params(packed, s, rows.device) is not None:
                raise NotImplementedError(
                    "a StaticInferenceContext holds one batch of equal lengths; for requests of "
                    "other lengths use Megatron's DynamicInferenceContext."
                )
            offset = context.sequence_len_offset
            if attention_mask is not None:
                require_causal(attention_mask, B, offset + s, lambda: range(offset, offset + s))
            assert self.layer_number is not None
            return mix_static(rows, self.whole_parts(rows), context, self.layer_number)

    def _refuse_generation(self, rows: Tensor, context: Any) -> None:
        static = getattr(context, "is_static_batching", None)
        if static is None or not (static() or hasattr(context, "mamba_states_cache")):
            raise NotImplementedError(
                f"{type(self).__name__} generates with Megatron's StaticInferenceContext and "
                f"DynamicInferenceContext, not with a {type(context).__name__}."
            )
        if self.layer_number is None:
            raise ValueError(
                "a layer keeps its state under its layer_number; build it with layer_number=1, 2, "
                "..."
            )
        cp_size = self.pg_collection.cp.size()
        if cp_size > 1 and not getattr(context, "whole_on_every_rank", False):
            raise NotImplementedError(
                f"generation runs on whole sequences, and this layer was built with "
                f"context_parallel_size={cp_size}; build the model with 1 and load the "
                f"checkpoint there, or let every rank run all tokens, with a context from "
                f"megatron_gdn.inference.generate.static_context."
            )
        if torch.is_grad_enabled() and rows.requires_grad:
            raise NotImplementedError(
                "generation has no backward; call the model under torch.inference_mode() or "
                "torch.no_grad(), or without an inference context to train it."
            )

    def _dynamic_step(self, rows: Tensor, context: Any) -> Tensor:
        """One step's tokens, padding included, ``[t, 1, P]`` to ``[t, 1, H V]``."""
        refuse(context, type(self).__name__)
        assert self.layer_number is not None
        number = self.layer_number - self.pp_layer_offset
        buffers: tuple[Tensor, Tensor] = context.mamba_states_cache(number)
        s = 1 + context.num_speculative_tokens
        intermediate: tuple[Tensor | None, Tensor | None] = (None, None)
        if s > 1:
            intermediate = context.mamba_states_cache(number, intermediate=True)
        padded, real = context.padded_batch_dimensions, context.batch_dimensions
        count, mixed = padded.decode_req_count * s, None
        if count:
            of_requests = rows[:count, 0].unflatten(0, (-1, s))
            slots = context.mamba_metadata.batch_indices_decode
            mixed = self.ssm_decode(of_requests, *buffers, slots, *intermediate)
            mixed = mixed.flatten(0, 1)[:, None]
        if mixed is None or count < len(rows):
            decoded, (heads, _, columns, _) = mixed, self.dims.state
            mixed = rows.new_zeros(rows.shape[0], 1, heads * columns)
            if decoded is not None:
                mixed[:count] = decoded
        if padded.prefill_req_count:
            begin = real.decode_req_count * s
            mixed[begin:] = self.ssm_prefill(rows[begin:], *buffers, context)
        return mixed

    # Megatron's dynamic inference calls the methods below by these names.

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """A request's conv window ``[C, W]`` and its states ``[H, K, V]`` (or ``[H, V, K]``).

        In ``batch_invariant_mode`` it is larger, see :class:`...ops.generation.memory.Memory`.
        """
        heads, rows, columns, _ = self.dims.state
        states = (heads, columns, rows) if self.state_transposed else (heads, rows, columns)
        taps, on_grid = self.conv_weight.shape[-1], self.config.batch_invariant_mode
        shape = MemoryShape.of(self.dims.layout, self.dims.state, taps, on_grid)
        return shape.window(shape.past + 1), states

    def ssm_decode(
        self,
        projected: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        batch_indices: Tensor | None = None,
        intermediate_conv_state: Tensor | None = None,
        intermediate_ssm_state: Tensor | None = None,
    ) -> Tensor:
        """As :func:`.dynamic.decode_requests`; without ``batch_indices`` request n is in slot n."""
        parts, slots = self.whole_parts(projected.transpose(0, 1)), batch_indices
        if slots is None:
            slots = torch.arange(len(projected), device=projected.device)
        memory, after = self._in_slots(parts, projected, conv_state, ssm_state, slots), None
        if intermediate_conv_state is not None and intermediate_ssm_state is not None:
            after = self._viewed(intermediate_conv_state, intermediate_ssm_state)
        return decode_requests(projected, parts, memory, after)

    def ssm_prefill(
        self, projected: Tensor, conv_state: Tensor, ssm_state: Tensor, context: Any
    ) -> Tensor:
        """``[t, 1, P]`` to ``[t, 1, H V]``, see :func:`.dynamic.prefill_requests`."""
        parts = self.whole_parts(projected)
        memory = self._in_slots(parts, projected, conv_state, ssm_state)
        return prefill_requests(projected, parts, memory, context.mamba_metadata)

    def _viewed(self, conv: Tensor, states: Tensor, slots: Tensor | None = None) -> Memory:
        return Memory(conv, states.mT if self.state_transposed else states, slots)

    def _in_slots(
        self, parts: Parts, rows: Tensor, conv: Tensor, states: Tensor, slots: Tensor | None = None
    ) -> Memory:
        memory = self._viewed(conv, states, slots)
        check_buffers(memory, parts, rows.dtype, self.state_transposed)
        return memory
