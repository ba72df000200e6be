"""The linear-attention module of a transformers model, run by this package.

Legend: B batch, S tokens of a row, H hidden size, T rows of the mixer, P projection width,
V mixed width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...context_parallel import LinearCpMode, SequenceLayout
from ...context_parallel.scheme import local_parameters
from ...mixers.hooks import require_plain_conv, run_pre_hooks
from ...mixers.loader_layout import LoaderLayout
from ...mixers.micro_batch import ChooseRule, MicroBatches
from ...ops.layout import Layout
from ...ops.mixer import mix
from ...ops.parts import GatedNorm
from ...ops.readout.base import Apart, called_per_head
from ..state_dict_adapter import FP32_GDN_PARAM_NAMES
from . import gdn, kda
from .batch import ModelBatch, resolve_batch
from .families import (
    LinearAttention,
    class_for_config,
    family_of,
    plain_gate,
    project,
    transformers_class,
)
from .gates import HoldsGates, gate_owner, hold_gates, release_gates, tell_of_other_dtype
from .place import group_of, place_of, require_agreement
from .plain_functions import plain_functions_on_cpu
from .sources import Sources, offsets_of

_UNPACKED = ("transformers", "fused")
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True, kw_only=True)
class DropInOptions:
    """How replaced modules run; the arguments of :func:`.patching.patch`."""

    cp_mesh: Any = None
    cp_layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER
    linear_cp_mode: str | LinearCpMode | None = None
    backend: str = "auto"
    rule_operands: str = "fp16"
    unpacked: str = "transformers"
    recompute_qkv: bool = False

    def __post_init__(self) -> None:
        SequenceLayout.parse(self.cp_layout)
        LinearCpMode.of(self.linear_cp_mode, None)
        if self.unpacked not in _UNPACKED:
            raise ValueError(
                f"unpacked={self.unpacked!r} is not known; use 'transformers' (its own code and "
                f"bits where a batch is not packed and one rank holds it) or 'fused' (the mixer of "
                f"this package everywhere)."
            )
        group_of(self.cp_mesh)


@dataclass(eq=False)
class _Runner:
    """What a replaced module has beside its parameters."""

    options: DropInOptions
    kind: ModuleType
    dims: Any
    rule: ChooseRule
    expected: Any  # the fields of a TransformerConfig that are read
    stored: dict[str, torch.dtype]
    made: dict[tuple[Any, SequenceLayout], MicroBatches] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> _Runner:
        """A copied model keeps the same mesh, because process groups cannot be copied."""
        return replace(self, stored=dict(self.stored), made={})

    def run_over(self, cp_mesh: Any) -> None:
        """Context parallelism over another mesh, from the next forward on; None is one rank.

        Raises:
            ValueError: a mesh of several dimensions, heads that its ranks cannot share.
        """
        options = replace(self.options, cp_mesh=cp_mesh)
        self.micro_batches(group_of(cp_mesh), SequenceLayout.parse(options.cp_layout))
        self.options = options

    def micro_batches(self, group: Any, layout: SequenceLayout) -> MicroBatches:
        """What runs micro-batches whose rows lie in ``layout`` over ``group``."""
        if (group, layout) not in self.made:
            dims = self.dims
            self.made[group, layout] = MicroBatches(
                self.expected, dims.layout, dims.state, dims.conv_kernel_dim,
                group, LoaderLayout(layout, self.expected), mode=self.options.linear_cp_mode,
                choose_rule=self.rule, **self.kind.NAMES,
            )  # fmt: skip
        return self.made[group, layout]


class CPAwareGatedDeltaNet(HoldsGates, LinearAttention):
    """transformers' Gated DeltaNet or Kimi Delta Attention, packed or over context-parallel ranks.

        q, k, v, z, b, a = projections(x);   y = out_proj(RMSNorm(rule(conv(q, k, v))) * act(z))

    ``CPAwareGatedDeltaNet(config, layer_idx, ...)`` builds the module of the config's family;
    :func:`.patching.patch` turns those of a model into it. Parameters, state-dict keys and the
    class that ``isinstance`` sees are transformers' own. ``A_log`` and ``dt_bias`` are fp32,
    even if the module is built, cast or loaded in another dtype.

    On one rank, a batch that is not packed goes through transformers' own forward, with its bits,
    kernels and cache (unless ``unpacked="fused"``). Every other batch runs this package's mixer.

    Args:
        config: text config of one of the models that :func:`.patching.patch` takes.
        layer_idx: number of the layer in the model, from 0.
        options: see :func:`.patching.patch`.

    Raises:
        ValueError: a config of another family, another activation than SiLU, sizes that do not fit.
    """

    drop_in: _Runner

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any):
        if cls is CPAwareGatedDeltaNet:
            return super().__new__(drop_in_class(class_for_config(config)))
        return super().__new__(cls)

    def __init__(self, config: Any, layer_idx: int, **options: Any) -> None:
        super().__init__(config, layer_idx)
        become_drop_in(self, config, DropInOptions(**options))

    @property
    def _cp_mesh(self) -> Any:
        """The mesh of context parallelism. A parallelizer may set it, for the next forwards.

        In a patched model all layers must be given one mesh.
        """
        return self.drop_in.options.cp_mesh

    @_cp_mesh.setter
    def _cp_mesh(self, cp_mesh: Any) -> None:
        self.drop_in.run_over(cp_mesh)

    def _compute_gate(self, a: Tensor) -> Tensor:
        """The log-decay of ``a`` ``[..., num_v_heads]``, see :class:`.gates.SSMGate`."""
        return self._gates(a)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        *,
        cache_position: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens: Tensor | None = None,
        indices: Tensor | None = None,
        seq_index: Tensor | None = None,
        gdn_batch: ModelBatch | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: ``[B, S, H]``, this rank's tokens.
            cache_params: transformers' cache; transformers' own forward then runs.
            cache_position, qkv_format: not read; callers of older transformers pass them.
                Arguments after ``cache_params`` are keywords: their order differs by version.
            attention_mask: ``[B, S]``, 0 at padding, or ids of documents (1 ..) where packed.
            position_ids, cu_seqlens: other sources of documents, see :mod:`.sources`; so are
                ``cu_seq_lens_q`` and ``_packed_seq_ids`` among the keywords.
            indices: int ``[T]``, which of the ``B * S`` tokens ``cu_seqlens`` counts; the others
                are padding.
            seq_index: with context parallelism, the sequence positions of this rank's tokens.
            gdn_batch: all this, resolved; a patched model passes it to its layers.
            kwargs: what transformers passes on to its kernels.

        Returns:
            ``[B, S, H]``; exactly zero at the padding of packed rows.

        Raises:
            ValueError: boundaries, ids, positions or lengths that do not fit or contradict each
                other; documents with a batch that continues from a cache.
            NotImplementedError: a cache together with packed documents or context parallelism.
        """
        batch = gdn_batch
        packed_seq_ids = kwargs.pop("_packed_seq_ids", None)
        offsets = offsets_of(cu_seqlens, kwargs.get("cu_seq_lens_q"))
        if batch is None:
            options = self.drop_in.options
            sources = Sources(attention_mask, packed_seq_ids, offsets, position_ids, indices)
            goes_on = cache_params is not None and cache_params.get_seq_length() > 0
            if goes_on and group_of(options.cp_mesh) is None:
                refuse_documents_after_cache(sources, seq_index)
            else:
                batch = resolve_call(options, sources, hidden_states, seq_index)
        if cache_params is not None and batch is not None and not batch.is_plain:
            raise NotImplementedError(
                "a cache cannot be filled from packed documents or under context parallelism: it "
                "holds one state per row. Pass use_cache=False, and generate from one sequence per "
                "row on one rank."
            )
        if batch is not None:
            for name in _OFFSETS:  # the batch has them; plain-torch kernels refuse them
                kwargs.pop(name, None)
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = None  # no padding, or the batch has its documents
        if batch is None or batch.is_plain:
            if cache_params is not None or self.drop_in.options.unpacked == "transformers":
                return self._by_transformers(hidden_states, cache_params, attention_mask, kwargs)
            keep = None if attention_mask is None else attention_mask != 0
            batch = ModelBatch(keep=keep)
        return self._by_mixer(hidden_states, batch)

    def _by_transformers(self, hidden_states: Tensor, cache: Any, mask: Any, kwargs: Any) -> Tensor:
        """Run transformers' own forward, with the gates that the holder returns."""
        owner = gate_owner(self)
        A_log, dt_bias = owner._gates()
        owner.__dict__.update(A_log=A_log, dt_bias=dt_bias)
        try:
            return super().forward(hidden_states, cache_params=cache, attention_mask=mask, **kwargs)
        finally:
            del owner.__dict__["A_log"], owner.__dict__["dt_bias"]

    def _by_mixer(self, hidden_states: Tensor, batch: ModelBatch) -> Tensor:
        proj_BTP = project(self, batch.enter(hidden_states), self.drop_in.dims)
        # torch.compiler.disable has no types.
        mixed = self._mix(proj_BTP.transpose(0, 1), batch)  # pyright: ignore[reportCallIssue]
        out_proj = self._modules[family_of(self).out]
        return batch.leave(out_proj(mixed.transpose(0, 1)), hidden_states)

    @torch.compiler.disable  # tables on the host, and one autograd function
    def _mix(self, proj_TBP: Tensor, model_batch: ModelBatch) -> Tensor:
        run = self.drop_in.micro_batches(model_batch.group, model_batch.layout)
        batch = run.of(model_batch.packed, proj_TBP)
        scheme, conv = batch.scheme, self.conv1d
        rows, layout = batch.passage.open(proj_TBP), batch.scheme.layout
        A_log, dt_bias = gate_owner(self)._gates()
        require_plain_conv(conv)
        _require_silu(self)
        run_pre_hooks(conv, lambda: rows.detach()[..., layout.conv_columns].permute(1, 2, 0))
        parameters = local_parameters(scheme, conv.weight, conv.bias, A_log.flatten(), dt_bias)
        norm = _norm_of(self._modules[family_of(self).norm], layout)
        parts = self.drop_in.kind.parts_of(
            self, rows, parameters, batch, norm, self.drop_in.options
        )
        return batch.passage.close(mix(rows, parts, batch.passage.neighbours))


def _norm_of(norm: Any, layout: Layout) -> GatedNorm | Apart:
    """The plain gated norm's parameters, or a readout that calls another norm."""
    activation = plain_gate(norm)
    if activation is not None:
        return GatedNorm(norm.weight, norm.variance_epsilon, activation=activation)

    def call(o: Tensor, z: Tensor) -> Tensor:
        return norm(o.reshape(-1, o.shape[-1]), z.reshape(-1, z.shape[-1])).view(o.shape)

    return called_per_head(layout.gate_columns, layout.state_heads, call)


def resolve_call(
    options: DropInOptions, sources: Sources, x_BSH: Tensor, seq_index: Tensor | None
) -> ModelBatch:
    """:func:`.batch.resolve_batch` for hidden states (or ids) ``[B, S, ...]`` on this rank."""
    rows, tokens = x_BSH.shape[:2]
    group = group_of(options.cp_mesh)
    if group is None:
        if seq_index is not None and not torch.equal(
            _flat(seq_index), torch.arange(tokens, device="cpu")
        ):
            raise ValueError(
                f"seq_index of shape {tuple(seq_index.shape)} without context-parallel ranks: one "
                f"rank holds the whole sequence, whose {tokens} tokens must be in order."
            )
        return resolve_batch(sources, rows, tokens, x_BSH.device)
    if sources.cu_seqlens is not None:
        offsets = torch.as_tensor(sources.cu_seqlens, device="cpu").detach().long()
        sources = sources._replace(cu_seqlens=offsets)
    require_agreement(sources, x_BSH.shape, seq_index, group, x_BSH.device)
    place = place_of(
        group, SequenceLayout.parse(options.cp_layout), tokens, x_BSH.device, seq_index,
        by_document=sources.cu_seqlens is not None,
    )  # fmt: skip
    return resolve_batch(sources, rows, tokens, x_BSH.device, place)


def refuse_documents_after_cache(sources: Sources, seq_index: Tensor | None) -> None:
    """Refuse documents with a batch that continues from a cache: it has one sequence per row.

    Raises:
        ValueError: something besides a mask and positions was given; the message names it.
    """
    told = {
        "_packed_seq_ids": sources.packed_seq_ids,
        "cu_seqlens or cu_seq_lens_q": sources.cu_seqlens,
        "indices": sources.indices,
        "seq_index": seq_index,
    }
    given = [name for name, x in told.items() if x is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} with a batch that goes on from a cache: it holds one sequence "
            f"per row, in order. Leave it out, or pass no past_key_values."
        )


def _flat(seq_index: Tensor) -> Tensor:
    """int64 on the host, of one row if all are equal."""
    index = seq_index.detach().to("cpu", torch.int64)
    if index.dim() == 2 and not bool((index != index[:1]).any()):
        index = index[0]
    return index


@lru_cache
def drop_in_class(cls: type) -> type[Any]:
    """The subclass of a transformers class that runs as a drop-in."""
    return type(f"CPAware{cls.__name__}", (CPAwareGatedDeltaNet, cls), {"__doc__": cls.__doc__})


def _require_silu(module: Any) -> None:
    if module.activation not in ("silu", "swish"):
        raise ValueError(
            f"{type(module).__name__} has activation={module.activation!r} (config.hidden_act); "
            f"the convolution's activation is SiLU here. Set "
            f"hidden_act='silu', or leave this model unpatched."
        )


def become_drop_in(module: Any, config: Any, options: DropInOptions) -> CPAwareGatedDeltaNet:
    """Turn a module of transformers into a drop-in, with the same parameters.

    Raises:
        ValueError: another activation than SiLU, or a conv1d that is not torch's Conv1d.
    """
    _require_silu(module)
    if not isinstance(module.conv1d, nn.Conv1d):
        raise ValueError(
            f"conv1d of {type(module).__name__} is a {type(module.conv1d).__name__}, not torch's "
            f"Conv1d, whose weight the mixer reads. Leave conv1d out of adapters and quantization."
        )
    kind = {"gdn": gdn, "kda": kda}[family_of(module).kind]
    dims = kind.dims_of(config)
    dtype = module._modules[family_of(module).out].weight.dtype
    expected = SimpleNamespace(
        deterministic_mode=False,
        batch_invariant_mode=False,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
    )
    if not isinstance(module, CPAwareGatedDeltaNet):
        module.__class__ = drop_in_class(transformers_class(module))
    plain_functions_on_cpu(module)
    tell_of_other_dtype(config)
    owner = gate_owner(module)
    stored = {name: owner._parameters[name].dtype for name in FP32_GDN_PARAM_NAMES}
    hold_gates(owner)
    rule = kind.rule_of(module, dims, options)
    module.drop_in = _Runner(options, kind, dims, rule, expected, stored)
    module.drop_in.run_over(options.cp_mesh)
    return module


def stop_being_drop_in(module: CPAwareGatedDeltaNet) -> None:
    """Undo :func:`become_drop_in`."""
    release_gates(gate_owner(module), module.drop_in.stored)
    del module.drop_in
    module.__class__ = type(module).__bases__[1]
