"""The linear-attention module of a transformers model, run by this package."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...compat.tested import warn_of_untested
from ...context_parallel import LinearCpMode, SequenceLayout
from ...context_parallel.scheme import local_conv_parameters
from ...mixers.hooks import (
    forward_name,
    has_hooks,
    loaded_by_accelerate,
    require_plain_conv,
    run_pre_hooks,
    runs_class_forward,
)
from ...mixers.loader_layout import LoaderLayout
from ...mixers.micro_batch import MicroBatch, MicroBatches
from ...mixers.options import MixerOptions
from ...ops.layout import Layout
from ...ops.mixer import mix
from ...ops.readout.base import ACTIVATIONS, SplitReadout, readout_by_module
from ...ops.stages import GatedNorm, stages_of
from ..config_fields import check_config
from ..state_dict_adapter import FP32_GDN_PARAM_NAMES
from . import families
from .batch import ModelBatch, group_of, resolve_batch
from .gates import HoldsGates, gate_owner, hold_gates, release_gates
from .sources import Sources, cache_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Keywords that transformers' own forward does not get; :class:`ModelBatch` has their
# content.
_NOT_PASSED_ON = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "position_ids",
    "cache_position",
    "qkv_format",
)


@dataclass(kw_only=True, eq=False)
class DropInOptions:
    """The options of :func:`.patching.patch`, in one object for all layers of a patched
    model."""

    cp_mesh: DeviceMesh | None = None
    cp_layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER
    linear_cp_mode: str | LinearCpMode | None = None
    backend: str = "auto"
    rule_operands: str = "fp16"
    unpacked: str = "transformers"
    recompute_qkv: bool = False

    @classmethod
    def from_keywords(cls, **options: Any) -> DropInOptions:
        """The options that a caller gave; a ValueError names an option that does not
        exist."""
        legal = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in legal]:
            raise ValueError(
                f"unknown option {', '.join(unknown)}; the options are "
                f"{', '.join(legal)}, and attention of megatron_gdn.hf.patch."
            )
        return cls(**options)

    def __post_init__(self) -> None:
        group_of(self.cp_mesh)
        if not isinstance(self.recompute_qkv, bool):
            raise ValueError(
                f"recompute_qkv={self.recompute_qkv!r} must be True or False."
            )
        self.cp_layout = SequenceLayout.parse(self.cp_layout)
        if self.unpacked not in ("transformers", "fused"):
            raise ValueError(
                f"unpacked={self.unpacked!r} is not known; use 'transformers' (its own "
                "code and bits where a batch is not packed and one rank holds it) or "
                "'fused' (the mixer of this package everywhere)."
            )

    def __deepcopy__(self, memo: dict) -> DropInOptions:
        """Copy the options; the copy has the same mesh, since process groups cannot be
        copied."""
        return replace(self)


@dataclass(eq=False)
class _DropInState:
    """Options, mixer, micro-batches and old gate dtypes of a module that became a
    drop-in."""

    options: DropInOptions
    mixer: families.Mixer
    micro_batches: MicroBatches
    loader_layout: LoaderLayout  # the sequence layout of ``micro_batches``
    # dtypes of A_log and dt_bias before they became fp32
    stored: dict[str, torch.dtype]
    cache_name: str  # the name under which transformers' own forward takes the cache

    def micro_batch(self, batch: ModelBatch, proj_TBP: Tensor) -> MicroBatch:
        """The :class:`MicroBatch` of ``batch``; ``proj_TBP``: the projections of its
        tokens."""
        # another layer has set cp_mesh
        if batch.share.group is not self.micro_batches.group:
            self.micro_batches.use_group(batch.share.group)
        self.loader_layout.option = batch.share.layout
        return self.micro_batches.of(None, proj_TBP, documents=batch.share.documents)


class CPAwareGatedDeltaNet(HoldsGates, nn.Module):
    """transformers' Gated DeltaNet or Kimi Delta Attention, packed or over
    context-parallel ranks.

        q, k, v, z, b, a = projections(x);  y = out_proj(RMSNorm(rule(conv(q, k, v))) * act(z))

    ``CPAwareGatedDeltaNet(config, layer_idx, ...)`` builds the module of the config's
    family; :func:`.patching.patch` gives a model's modules this class. Parameters,
    state-dict keys and the class that ``isinstance`` sees are transformers' own.
    ``A_log`` and ``dt_bias`` stay fp32.

    On one rank, a batch that is not packed runs transformers' own forward, with its
    bits, kernels and cache (unless ``unpacked="fused"``). Every other batch runs this
    package's mixer.

    ``options`` are those of :func:`.patching.patch` except ``attention``.

    Raises:
        ValueError: the config's family is unknown, its activation is not SiLU, or sizes
            do not fit.
    """

    drop_in: _DropInState
    conv1d: nn.Conv1d

    def __new__(cls, config: object = None, *args: object, **kwargs: object):
        if cls is CPAwareGatedDeltaNet:
            original = families.class_for_config(config)
            return super().__new__(families.subclass("CPAware", cls, original))
        return super().__new__(cls)

    def __init__(self, config: object, layer_idx: int, **options: object) -> None:
        """``layer_idx``: the layer's index in the model; ``options``: as in the
        class."""
        super().__init__(config, layer_idx)
        become_drop_in(self, config, DropInOptions.from_keywords(**options))

    @property
    def _cp_mesh(self) -> DeviceMesh | None:
        """The context-parallel mesh; setting it in one layer sets the mesh of the whole
        model."""
        return self.drop_in.options.cp_mesh

    @_cp_mesh.setter
    def _cp_mesh(self, cp_mesh: DeviceMesh | None) -> None:
        self.drop_in.micro_batches.use_group(group_of(cp_mesh))
        self.drop_in.options.cp_mesh = cp_mesh

    def _compute_gate(self, a: Tensor) -> Tensor:
        """The log-decay g = -exp(A_log) * softplus(a + dt_bias) of ``a``
        ``[..., num_v_heads]``."""
        return self._gates(a)

    def forward(
        self,
        hidden_states: Tensor,
        cache: object = None,
        *,
        cache_params: object = None,
        attention_mask: Tensor | None = None,
        gdn_batch: ModelBatch | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: ``[B, S, D]``, this rank's tokens.
            cache: transformers' cache; with a cache, transformers' own forward runs.
                Later arguments are keyword-only, since their order depends on
                transformers' version.
            cache_params: the same cache, by the name that transformers gave it before
                5.24.
            attention_mask: ``[B, S]``, 0 at padding, or document ids 1, 2, ... if
                packed.
            gdn_batch: the batch's boundaries; a patched model finds them once for all
                layers.
            kwargs: ``position_ids``, ``cu_seqlens`` (or ``cu_seq_lens_q``),
                ``_packed_seq_ids``: other sources of documents (:mod:`.sources`).
                ``indices``: int ``[T]``, which of the ``B * S`` tokens ``cu_seqlens``
                counts; others are padding. ``seq_index``: with context parallelism, the
                sequence positions of this rank's tokens. ``cache_position`` and
                ``qkv_format`` are not read. Other keywords go to transformers' kernels.

        Returns:
            ``[B, S, D]``; exactly zero at the padding of packed rows.

        Raises:
            ValueError: boundaries, ids, positions or lengths do not fit or contradict
                each other, or a cache comes with packed documents or context
                parallelism.
        """
        batch = gdn_batch
        options = self.drop_in.options
        cache = cache_in({"cache": cache, "cache_params": cache_params})
        if batch is None:
            sources = Sources.from_keywords(attention_mask, kwargs)
            batch = cast(Any, resolve_batch)(options, sources, hidden_states, cache)
        for name in _NOT_PASSED_ON:
            kwargs.pop(name, None)
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = None  # the batch holds the mask's documents and padding
        original = cache is not None or options.unpacked == "transformers"
        if batch is None or (batch.is_plain and original):
            return self._run_original(hidden_states, cache, attention_mask, kwargs)
        proj_BTP = families.project(
            self, batch.enter(hidden_states), self.drop_in.mixer.dims
        )
        mixed = cast(Any, self._mix)(proj_BTP.transpose(0, 1), batch)
        out_proj = self._modules[families.family_of(self).out]
        return batch.leave(out_proj(mixed.transpose(0, 1)), hidden_states)

    def _run_original(
        self, hidden_states: Tensor, cache: object, mask: object, kwargs: dict
    ) -> Tensor:
        """Run transformers' own forward, with ``A_log`` and ``dt_bias`` gathered if
        sharded."""
        owner = gate_owner(self)
        kwargs[self.drop_in.cache_name] = cache
        owner.require_fp32_parameters()
        if owner._gates_are_sharded:
            gathered = owner._gates()
        else:
            gathered = ()
        vars(owner).update(zip(FP32_GDN_PARAM_NAMES, gathered, strict=False))
        try:
            return super().forward(hidden_states, attention_mask=mask, **kwargs)
        finally:
            for name in FP32_GDN_PARAM_NAMES:
                vars(owner).pop(name, None)

    # the host computes tables, which torch.compile cannot trace
    @torch.compiler.disable
    def _mix(self, proj_TBP: Tensor, model_batch: ModelBatch) -> Tensor:
        """Run conv, rule and norm on the projections ``proj_TBP`` of the batch
        ``model_batch``."""
        owner = gate_owner(self)
        if owner is self:
            not_called = [self.conv1d]
        else:
            not_called = [self.conv1d, owner]
        with loaded_by_accelerate(*not_called):
            return self._mix_loaded(proj_TBP, model_batch)

    def _mix_loaded(self, proj_TBP: Tensor, model_batch: ModelBatch) -> Tensor:
        """:meth:`_mix` while the parameters that it reads are on the device of
        ``proj_TBP``."""
        batch = self.drop_in.micro_batch(model_batch, proj_TBP)
        scheme = batch.scheme
        conv = self.conv1d
        rows = batch.passage.to_stages(proj_TBP)
        layout = batch.scheme.layout
        A_log, dt_bias = gate_owner(self)._gates()
        _require_silu_and_plain_conv(self)
        run_pre_hooks(
            conv, lambda: rows.detach()[..., layout.conv_columns].permute(1, 2, 0)
        )
        parameters = conv.weight, conv.bias, A_log.flatten(), dt_bias
        if scheme.exchanges_heads:
            per_head = [scheme.local_parameter(x) for x in parameters[2:]]
            own_conv = local_conv_parameters(scheme, conv.weight, conv.bias)
            parameters = own_conv + tuple(per_head)
        norm = _gated_norm(self._modules[families.family_of(self).norm], layout)
        stages = stages_of(batch.front, batch.rule, rows, parameters, norm)
        return batch.passage.from_stages(
            mix(rows, stages, batch.passage.sequence_context)
        )


def _gated_norm(norm: Any, layout: Layout) -> GatedNorm | SplitReadout:
    """The fused norm if ``norm`` is transformers' unpatched norm, else a readout that
    calls it."""
    cls = type(norm)
    activation = getattr(norm, "activation", None)
    plain = (
        cls.__name__.endswith("RMSNormGated")
        and cls.__module__.startswith("transformers.")
        and cls.forward.__module__.startswith("transformers.")
        and "_hf_hook" not in vars(norm)
        and runs_class_forward(norm)
        and not has_hooks(norm)
    )
    if plain and activation in ACTIVATIONS:
        return GatedNorm(norm.weight, norm.variance_epsilon, activation=activation)

    def call_norm(o: Tensor, z: Tensor) -> Tensor:
        """Call ``norm`` on outputs ``o`` and gates ``z`` with one row per head."""
        return norm(o.reshape(-1, o.shape[-1]), z.reshape(-1, z.shape[-1])).view(
            o.shape
        )

    return readout_by_module(layout.gate_columns, layout.state_heads, call_norm)


def _require_silu_and_plain_conv(module: families.LinearAttention) -> None:
    """Raise if the activation is not SiLU or ``conv1d`` is not torch's plain
    convolution."""
    require_plain_conv(module.conv1d)
    if module.activation not in ("silu", "swish"):
        raise ValueError(
            f"{type(module).__name__} has activation={module.activation!r} "
            "(config.hidden_act); the convolution's activation is SiLU here. Set "
            "hidden_act='silu', or leave this model unpatched."
        )


def become_drop_in(
    module: families.LinearAttention, config: object, options: DropInOptions
) -> CPAwareGatedDeltaNet:
    """Turn transformers' ``module`` into a drop-in in place; its parameters stay the
    same."""
    for package in ("python", "torch", "transformers"):
        warn_of_untested(package)
    _require_silu_and_plain_conv(module)
    if not runs_class_forward(module):
        raise ValueError(
            f"{type(module).__name__} has a forward of its own "
            f"({vars(module)['forward']}), which would run in place of the mixer. "
            "Patch the model before other code sets this forward, or remove it (del "
            "module.forward); accelerate's hooks may stay."
        )
    family = families.family_of(module)
    owner = gate_owner(module)
    check_config(config, family.fields)
    dtype = module._modules[family.out].weight.dtype
    mixer = family.mixer(module, config, options)
    # fields of the config that MicroBatches reads
    megatron_config: Any = SimpleNamespace(
        deterministic_mode=False,
        batch_invariant_mode=False,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
    )
    stored = {name: owner._parameters[name].dtype for name in FP32_GDN_PARAM_NAMES}
    loader_layout = LoaderLayout(options.cp_layout, megatron_config)
    micro_batches = MicroBatches(
        megatron_config,
        mixer.dims.layout,
        mixer.dims.state,
        mixer.dims.conv_kernel_dim,
        group_of(options.cp_mesh),
        loader_layout,
        MixerOptions(linear_cp_mode=options.linear_cp_mode),
        mixer.rule,
        mixer.front,
        **mixer.names,
    )
    original: Any = families.transformers_class(module)
    if not isinstance(module, CPAwareGatedDeltaNet):
        _change_class(
            module, families.subclass("CPAware", CPAwareGatedDeltaNet, original)
        )
    families.plain_functions_on_cpu(module)
    hold_gates(owner)
    cache_name = families.cache_parameter(original.forward)
    module.drop_in = _DropInState(
        options, mixer, micro_batches, loader_layout, stored, cache_name
    )
    return module


def undo_drop_in(module: CPAwareGatedDeltaNet) -> None:
    """Undo :func:`become_drop_in`; cast ``A_log`` and ``dt_bias`` back to their old
    dtypes."""
    release_gates(gate_owner(module), module.drop_in.stored)
    del module.drop_in
    _change_class(module, type(module).__bases__[1])


def _change_class(module: nn.Module, cls: type) -> None:
    """Give ``module`` the class ``cls``; a bound ``forward`` of its own becomes that of
    ``cls``."""
    before = type(module).forward
    slot = forward_name(module)
    module.__class__ = cls
    if getattr(vars(module).get(slot), "__func__", None) is before:
        vars(module)[slot] = MethodType(cls.forward, module)
