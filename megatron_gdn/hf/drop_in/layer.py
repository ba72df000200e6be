"""The linear-attention module of a transformers model, run by this package."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

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
from ...mixers.micro_batch import MicroBatch, MicroBatchPlanner
from ...mixers.options import MixerOptions
from ...ops.autograd import uncompiled
from ...ops.layout import Layout
from ...ops.mixer import mix
from ...ops.readout.base import ACTIVATIONS, SplitReadout, readout_by_module
from ...ops.stages import GatedNorm, stages_of
from ..config_fields import check_config
from ..state_dict_adapter import FP32_GDN_PARAM_NAMES
from . import families
from .batch import ModelBatch, group_of, resolve_batch
from .gates import GateOwner, add_gate_holder, gate_owner, remove_gate_holder
from .sources import BoundarySources, find_cache

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Keywords that are read into a :class:`ModelBatch`. transformers' own forward does not
# get them.
_BATCH_KEYWORDS = (
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
    """The options of :func:`.patching.patch`; all layers of a patched model have the
    same object."""

    cp_mesh: DeviceMesh | None = None
    cp_layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER
    linear_cp_mode: str | LinearCpMode | None = None
    backend: str = "auto"
    rule_operands: str = "fp16"
    unpacked: str = "transformers"
    recompute_qkv: bool = False

    @classmethod
    def from_keywords(cls, **options: Any) -> DropInOptions:
        """Make the options that a caller gave; an unknown option is a ValueError."""
        legal = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in legal]:
            raise ValueError(
                f"unknown option {', '.join(unknown)}; the options are "
                f"{', '.join(legal)}, and attention of megatron_gdn.hf.patch."
            )
        return cls(**options)

    def __post_init__(self) -> None:
        """Check ``cp_mesh``, ``recompute_qkv`` and ``unpacked``, and make ``cp_layout``
        a `SequenceLayout`; an illegal value is a ValueError."""
        group_of(self.cp_mesh)  # raises for an illegal mesh
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
        """A copy of the options with the same mesh, since process groups cannot be
        copied."""
        return replace(self)


@dataclass(eq=False)
class _DropInState:
    """The state that a module gets when it becomes a drop-in."""

    options: DropInOptions
    mixer: families.DropInMixer
    micro_batches: MicroBatchPlanner
    loader_layout: LoaderLayout  # the sequence layout of ``micro_batches``
    # dtypes of A_log and dt_bias before they became fp32
    original_gate_dtypes: dict[str, torch.dtype]
    cache_name: str  # the argument in which transformers' own forward takes the cache

    def micro_batch(self, batch: ModelBatch, proj_TBP: Tensor) -> MicroBatch:
        """The :class:`MicroBatch` of ``batch``, whose projection rows are ``proj_TBP``
        (T tokens, B rows)."""
        # cp_mesh may have been set in another layer
        if batch.share.group is not self.micro_batches.group:
            self.micro_batches.use_group(batch.share.group)
        self.loader_layout.option = batch.share.layout
        # None: there are no PackedSeqParams of Megatron
        return self.micro_batches.of(None, proj_TBP, documents=batch.share.documents)


class CPAwareGatedDeltaNet(GateOwner, nn.Module):
    """transformers' Gated DeltaNet or Kimi Delta Attention, with packed documents and
    context parallelism.

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
        """An instance of the class that inherits from this one and from transformers'
        class for ``config``, so that ``isinstance`` sees both.

        Python then calls :meth:`__init__` with the same arguments. A class that has
        transformers' class already needs no ``config``: torch's DataParallel gives none.
        """
        if families.transformers_base(cls) is not None:
            return super().__new__(cls)
        original = families.class_for_config(config)
        return super().__new__(families.class_with_mixin("CPAware", cls, original))

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
        return self._gate_holder(a)

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
            gdn_batch: the batch's documents and padding, which a patched model finds
                once for all layers; None: the layer finds them itself.
            kwargs: ``position_ids``, ``cu_seqlens`` (or ``cu_seq_lens_q``),
                ``_packed_seq_ids``: other sources of documents (:mod:`.sources`).
                ``indices``: int ``[T]``, numbers of the tokens that ``cu_seqlens``
                counts, in the flattened ``B * S`` tokens; the other tokens are padding.
                ``seq_index``: with context parallelism, the sequence positions of this
                rank's tokens. ``cache_position`` and ``qkv_format`` are not read. Other
                keywords go to transformers' kernels.

        Returns:
            ``[B, S, D]``; exactly zero at the padding of packed rows.

        Raises:
            ValueError: boundaries, ids, positions or lengths do not fit, two of them
                contradict each other, or a cache comes with packed documents or context
                parallelism.
        """
        batch = gdn_batch
        options = self.drop_in.options
        cache = find_cache({"cache": cache, "cache_params": cache_params})
        if batch is None:
            sources = BoundarySources.from_keywords(attention_mask, kwargs)
            batch = resolve_batch(options, sources, hidden_states, cache)
        for name in _BATCH_KEYWORDS:
            kwargs.pop(name, None)
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = None  # the batch holds the mask's documents and padding
        # No batch: the forward continues from a filled cache. A plain batch: one rank,
        # and each row is one sequence.
        prefers_original = cache is not None or options.unpacked == "transformers"
        if batch is None or (batch.is_plain and prefers_original):
            return self._run_original(hidden_states, cache, attention_mask, kwargs)
        proj_BTP = families.project_rows(
            self, batch.to_mixer_rows(hidden_states), self.drop_in.mixer.dims
        )
        mixed = self._mix(proj_BTP.transpose(0, 1), batch)
        out_proj = self._modules[families.family_of(self).out_proj]
        return batch.from_mixer_rows(out_proj(mixed.transpose(0, 1)), hidden_states)

    def _run_original(
        self, hidden_states: Tensor, cache: object, mask: object, kwargs: dict
    ) -> Tensor:
        """Run transformers' own forward on ``hidden_states`` ``[B, S, D]``.

        ``mask``: its ``attention_mask``. ``kwargs``: further keywords of this forward;
        ``cache`` is added to them. If ``A_log`` and ``dt_bias`` are sharded, they are
        gathered before the forward.
        """
        owner = gate_owner(self)
        kwargs[self.drop_in.cache_name] = cache
        owner.require_fp32_parameters()
        if owner._gates_are_sharded:
            # attributes of the instance hide the sharded parameters from the forward
            gathered = owner._gate_holder()
            vars(owner).update(zip(FP32_GDN_PARAM_NAMES, gathered, strict=True))
        try:
            return super().forward(hidden_states, attention_mask=mask, **kwargs)
        finally:
            for name in FP32_GDN_PARAM_NAMES:
                vars(owner).pop(name, None)

    @uncompiled  # the host computes tables, which torch.compile cannot trace
    def _mix(self, proj_TBP: Tensor, model_batch: ModelBatch) -> Tensor:
        """Run convolution, rule and norm on projection rows; return the rows for the
        output projection, ``[T, B, H V]``."""
        # accelerate loads a module's parameters when the module is called. The mixer
        # reads the parameters of ``modules`` without a call.
        owner = gate_owner(self)
        modules = [self.conv1d]
        if owner is not self:
            modules.append(owner)
        with loaded_by_accelerate(*modules):
            return self._mix_on_device(proj_TBP, model_batch)

    def _mix_on_device(self, proj_TBP: Tensor, model_batch: ModelBatch) -> Tensor:
        """Do the work of :meth:`_mix`; all parameters are on the device of
        ``proj_TBP``.

        The batch's passage exchanges the rows. A rank that runs only some heads takes
        these heads' part of each parameter.
        """
        batch = self.drop_in.micro_batch(model_batch, proj_TBP)
        scheme = batch.scheme
        layout = scheme.layout
        conv = self.conv1d
        rows = batch.passage.to_stages(proj_TBP)
        A_log, dt_bias = gate_owner(self)._gate_holder()
        _require_silu_and_plain_conv(self)

        def conv_input() -> Tensor:
            """The tensor ``[B, C, T]`` that transformers would give to ``conv1d``. It has
            no autograd graph, since hooks may only read it."""
            return rows.detach()[..., layout.conv_columns].permute(1, 2, 0)

        # The front reads conv1d's weight without calling the module, and a hook may
        # load or change this weight.
        run_pre_hooks(conv, conv_input)
        # Kimi Linear's A_log is [1, 1, H, 1]
        parameters = conv.weight, conv.bias, A_log.flatten(), dt_bias
        if scheme.exchanges_heads:
            per_head = [scheme.local_parameter(x) for x in parameters[2:]]
            own_conv = local_conv_parameters(scheme, conv.weight, conv.bias)
            parameters = own_conv + tuple(per_head)
        norm = _gated_norm(self._modules[families.family_of(self).norm], layout)
        stages = stages_of(batch.front, batch.rule, rows, parameters, norm)
        mixed = mix(rows, stages, batch.passage.sequence_context)
        return batch.passage.from_stages(mixed)


def _gated_norm(norm: Any, layout: Layout) -> GatedNorm | SplitReadout:
    """The readout of the module ``norm``: this package's fused norm if ``norm`` is
    transformers' own and unchanged, else a readout that calls ``norm``.

    ``layout``: the columns of the gate z, and the heads of the output, on this rank.
    """
    forward = getattr(type(norm), "forward", None)  # None in a TorchScript module
    activation = getattr(norm, "activation", None)
    # `functools.wraps` copies the name of a function's module, but not its globals
    globals_of_forward = getattr(forward, "__globals__", {})
    is_unchanged = (
        globals_of_forward.get("__name__", "").startswith("transformers.")
        and "_hf_hook" not in vars(norm)  # of accelerate
        and runs_class_forward(norm)
        and not has_hooks(norm)
    )
    if is_unchanged and activation in ACTIVATIONS:
        return GatedNorm(norm.weight, norm.variance_epsilon, activation=activation)

    def call_norm(o: Tensor, z: Tensor) -> Tensor:
        """Call ``norm`` on outputs ``o`` and gates ``z`` ``[..., V]`` as rows
        ``[N, V]``; return the shape of ``o``."""
        o_rows = o.reshape(-1, o.shape[-1])
        z_rows = z.reshape(-1, z.shape[-1])
        return norm(o_rows, z_rows).view(o.shape)

    return readout_by_module(layout.gate_columns, layout.state_heads, call_norm)


def _require_silu_and_plain_conv(module: families.LinearAttention) -> None:
    """Raise if the activation of ``module`` is not SiLU, or if its ``conv1d`` is not
    torch's plain convolution: the front computes SiLU(conv) from the weights."""
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
    """Turn transformers' ``module`` into a :class:`CPAwareGatedDeltaNet` in place; its
    parameters stay the same objects.

    ``config``: the model's text config. Raises a ValueError if this package cannot
    compute what the module computes.
    """
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
    check_config(config, family.config_fields)
    dtype = module._modules[family.out_proj].weight.dtype
    mixer = family.make_mixer(module, config, options)
    # the fields of Megatron's config that MicroBatchPlanner and LoaderLayout read
    megatron_config: Any = SimpleNamespace(
        deterministic_mode=False,
        batch_invariant_mode=False,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
    )
    original_gate_dtypes = {
        name: owner._parameters[name].dtype for name in FP32_GDN_PARAM_NAMES
    }
    loader_layout = LoaderLayout(options.cp_layout, megatron_config)
    micro_batches = MicroBatchPlanner(
        megatron_config,
        mixer.dims.layout,
        mixer.dims.state_shape,
        mixer.dims.conv_kernel_dim,
        group_of(options.cp_mesh),
        loader_layout,
        MixerOptions(linear_cp_mode=options.linear_cp_mode),
        mixer.choose_rule,
        mixer.make_front,
        **mixer.names_in_log,
    )
    original: Any = families.transformers_class(module)
    if not isinstance(module, CPAwareGatedDeltaNet):
        _change_class(
            module, families.class_with_mixin("CPAware", CPAwareGatedDeltaNet, original)
        )
    families.plain_functions_on_cpu(module)
    add_gate_holder(owner)
    cache_name = families.cache_parameter(original.forward)
    module.drop_in = _DropInState(
        options,
        mixer,
        micro_batches,
        loader_layout,
        original_gate_dtypes,
        cache_name,
    )
    return module


def undo_drop_in(module: CPAwareGatedDeltaNet) -> None:
    """Undo :func:`become_drop_in`; cast ``A_log`` and ``dt_bias`` back to their old
    dtypes."""
    remove_gate_holder(gate_owner(module), module.drop_in.original_gate_dtypes)
    del module.drop_in
    _change_class(module, type(module).__bases__[1])


def _change_class(module: nn.Module, cls: type) -> None:
    """Give ``module`` the class ``cls``.

    accelerate leaves the bound ``forward`` of the old class as an attribute of the
    instance. Such an attribute becomes the bound ``forward`` of ``cls``.
    """
    old_forward = type(module).forward
    attribute = forward_name(module)
    module.__class__ = cls
    bound = vars(module).get(attribute)
    if getattr(bound, "__func__", None) is old_forward:
        vars(module)[attribute] = MethodType(cls.forward, module)
