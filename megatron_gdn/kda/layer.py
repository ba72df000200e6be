"""The Kimi Delta Attention layer for Megatron-Core.

The projection of a gate has full width (one linear), or low rank: a *narrow* linear
``*_a_proj`` to R columns, then a linear ``*_b_proj`` to the gate's width.

Legend: R columns of a gate's narrow linear, C columns of a gate on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.mappings import (
    all_to_all_sp2hp,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..compat.kda_files import convert_state_dict
from ..mixers.arguments import GDN_CONFIG_FIELDS, KnownConfigFields
from ..mixers.base import MixerSubmodules, RecurrentMixer
from ..mixers.fp8 import (
    build_linear,
    may_use_fp8,
    spec_outside_fp8,
)
from ..mixers.fp32_parameters import (
    Fp32Parameter,
    fill_A_log,
    fill_dt_bias,
)
from ..mixers.loader_layout import launch_arguments
from ..mixers.options import MixerOptions
from ..mixers.tensor_parallel import (
    check_muon_of_heads,
    fill_share,
    mark_heads,
)
from ..ops.stages import front_maker
from .front import kda_table
from .rule import RULES, choose_kda
from .sizes import KDADims

# The fields of newer Megatrons' configs about this layer.
_KDA_CONFIG_FIELDS = (
    "kda_f_lora_rank",
    "kda_gate_lora_rank",
    "kda_lower_bound",
    "kda_safe_gate",
)


@dataclass
class KimiDeltaAttentionSubmodules(MixerSubmodules):
    """Specs of the modules inside a :class:`KimiDeltaAttention`.

    ``in_proj`` must not begin with a norm, since other projections read the same input.
    The class of ``f_a_proj`` and ``g_a_proj`` must have the argument ``parallel_mode``,
    as Megatron's ``TELinear`` has. Such a linear has its whole weight on every
    tensor-parallel rank. ``beta_proj`` may be such a linear. All others are
    column-parallel linears.
    """

    beta_proj: ModuleSpec | type = IdentityOp  # hidden -> H, write strength
    f_proj: ModuleSpec | type = IdentityOp  # hidden -> H * K, forget gate
    f_a_proj: ModuleSpec | type = IdentityOp  # hidden -> R, forget gate of low rank
    f_b_proj: ModuleSpec | type = IdentityOp  # R -> H * K
    g_proj: ModuleSpec | type = IdentityOp  # hidden -> H * V, output gate
    g_a_proj: ModuleSpec | type = IdentityOp  # hidden -> R, output gate of low rank
    g_b_proj: ModuleSpec | type = IdentityOp  # R -> H * V


@dataclass(frozen=True, kw_only=True)
class KDAOptions(MixerOptions):
    """The options of a :class:`KimiDeltaAttention`. With ``recompute="light"`` only
    ``out_norm`` is recomputed.

    Args:
        forget_rank, output_rank: the rank of the forget gate's and of the output gate's
            projection; default ``config.kda_f_lora_rank`` and
            ``config.kda_gate_lora_rank``. 0, or None in the config: the gate has full
            width.
        gate_lower_bound: a number below 0 for the gate
            ``g = gate_lower_bound * sigmoid(exp(A_log) (f + dt_bias))``; default
            ``config.kda_lower_bound``.
        muon_per_head: whether Megatron's Muon orthogonalises the rows of each head
            separately. This changes in_proj and the gates' projections ``f_proj``,
            ``f_b_proj``, ``g_proj`` and ``g_b_proj``. Over several tensor-parallel ranks
            Muon needs ``--muon-tp-mode blockwise``.
    """

    absent_options = ("rule_operands",)
    mixer_name = "Kimi Delta Attention"
    rules = RULES

    forget_rank: int | None = None
    output_rank: int | None = None
    gate_lower_bound: float | None = None
    muon_per_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_negative_bound("gate_lower_bound", self.gate_lower_bound)


def _require_negative_bound(name: str, bound: float | None) -> None:
    """Raise a ValueError unless ``bound``, the lower bound of the log-decay, is None or
    below 0."""
    if bound is not None and not bound < 0:
        raise ValueError(
            f"{name}={bound} must be below 0: it bounds a log-decay. Use -5, or None "
            "for the unbounded gate."
        )


class KimiDeltaAttention(RecurrentMixer):
    """Kimi Delta Attention as a Megatron mixer: ``[s, B, D] -> [s, B, D]``::

        q, k, v, f, z = in_proj(x)             if both gates have full width; else
        q, k, v       = in_proj(x)
        f             = f_b_proj(f_a_proj(x))  or f_proj(x), in full width
        z             = g_b_proj(g_a_proj(x))  or g_proj(x), in full width

        b       = beta_proj(x)
        q, k, v = SiLU(causal_conv1d(q, k, v))
        q, k    = q / |q|, k / |k|                               per head
        g_t     = -exp(A_log) softplus(f_t + dt_bias)  log-decay per channel, fp32
        beta_t  = sigmoid(b_t)
        S_t     = Diag(exp(g_t)) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T
        o_t     = S_t^T q_t / sqrt(K)
        y       = out_proj(RMSNorm(o) * sigmoid(z))

    (Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.)
    :mod:`megatron_gdn.kda.reference` is this equation as code. Constructor, parameters
    and checkpoint keys are those of ``KimiDeltaAttention`` in
    ``megatron.core.ssm.gated_delta_net`` of newer Megatrons.

    Args:
        config: has ``hidden_size``, ``layernorm_epsilon`` and the ``linear_*`` sizes,
            and in newer Megatrons ``kda_f_lora_rank``, ``kda_gate_lora_rank`` and
            ``kda_lower_bound``. Each value head has gates and a state; Kimi Linear has
            as many key heads as value heads.
        bias: whether in_proj, beta_proj and out_proj have biases.
        options: the fields of :class:`.mixers.options.MixerOptions` and
            :class:`KDAOptions`; ``backend`` is ``"fla"``, ``"cudnn"`` (Hopper;
            ``"auto"`` never takes it), ``"reference"`` or ``"auto"``, see
            :func:`megatron_gdn.kda.rule.choose_kda`.

    The other arguments are as in :class:`megatron_gdn.GatedDeltaNet`. Pass options
    through ``ModuleSpec(params={...})``.

    Raises:
        ValueError: sizes that do not fit each other or the parallel sizes, a submodule
            that is missing or begins with a norm, or an option with an unknown or
            illegal value, such as ``backend`` or ``A_init_range``.
        NotImplementedError: the config sets ``fp4`` or ``linear_allow_neg_eigval``.
        ImportError: the requested backend is not available.
    """

    beta_proj: Any
    global_dims: KDADims
    dims: KDADims
    # names of the projections whose whole weight is on every tensor-parallel rank
    _duplicated_projections: set[str]

    options_class = KDAOptions
    launch_arguments = (
        "bias",
        "conv_bias",
        "conv_init",
        "use_qk_l2norm",
        "A_init_range",
    )
    known_config_fields: ClassVar[KnownConfigFields] = GDN_CONFIG_FIELDS._replace(
        prefixes=GDN_CONFIG_FIELDS.prefixes + ("kda_",),
        with_effect=GDN_CONFIG_FIELDS.with_effect + _KDA_CONFIG_FIELDS,
    )
    recurrence: ClassVar[str] = "KDA"
    fp32 = (
        Fp32Parameter(name="A_log", section="g", first_values=fill_A_log),
        Fp32Parameter(
            name="dt_bias",
            section="g",
            first_values=fill_dt_bias,
            has_value_per_column=True,
            is_registered_first=True,
        ),
    )
    may_be_captured: ClassVar[bool] = True
    # Scripts of a Megatron that has a class for this mixer store each section of in_proj
    # by itself.
    scripts_split_in_proj: ClassVar[bool] = hasattr(
        gated_delta_net, "KimiDeltaAttention"
    )
    conv_is_module = True
    dt_init_range = (0.001, 0.1)
    dt_init_floor = 1e-4
    output_gate_activation = "sigmoid"

    def __init__(
        self,
        config: TransformerConfig,
        submodules: KimiDeltaAttentionSubmodules,
        layer_number: int | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        conv_init: float | None = None,
        use_qk_l2norm: bool = True,
        A_init_range: tuple[float, float] = (1, 16),
        pg_collection: ProcessGroupCollection | None = None,
        *,
        name: str | None = None,
        cp_comm_type: str | Sequence[str] | None = None,
        pp_layer_offset: int | None = 0,
        is_mtp_layer: bool = False,
        **options: object,
    ) -> None:
        """Read sizes and options, then build the projections and parameters; arguments
        as in the class."""
        given = KDAOptions.of(options)
        kda_fields = {
            field: _config_field_or_flag(config, field) for field in _KDA_CONFIG_FIELDS
        }
        bound = given.gate_lower_bound
        if bound is None:
            bound = kda_fields["kda_lower_bound"]
            _require_negative_bound("kda_lower_bound", bound)
        if kda_fields["kda_safe_gate"] and bound is None:
            raise ValueError(
                "kda_safe_gate=True bounds the forget gate, and no bound is given. Set "
                "kda_lower_bound (--kda-lower-bound -5), or leave kda_safe_gate out."
            )
        if getattr(config, "linear_allow_neg_eigval", False):
            raise NotImplementedError(
                "linear_allow_neg_eigval=True: write strengths of KimiDeltaAttention "
                "end at 1. Give allow_neg_eigval to the GatedDeltaNet layers alone, by "
                "their spec."
            )
        forget_rank = given.forget_rank
        if forget_rank is None:
            forget_rank = kda_fields["kda_f_lora_rank"] or 0
        output_rank = given.output_rank
        if output_rank is None:
            output_rank = kda_fields["kda_gate_lora_rank"] or 0
        super().__init__(
            config,
            KDADims.of(config, forget_rank, output_rank),
            given,
            layer_number,
            pg_collection,
            pp_layer_offset,
            A_init_range,
            conv_init,
        )
        self.use_qk_l2norm = use_qk_l2norm
        self.gate_lower_bound = bound
        self.bias = bias
        self.muon_per_head = given.muon_per_head
        self._build(
            submodules,
            partial(choose_kda, given.backend, self.dims.state_shape, bound),
            front_maker(kda_table, lower_bound=bound, normalise_qk=use_qk_l2norm),
            name=name,
            bias=bias,
            conv_bias=conv_bias,
        )

    def project(self, hidden_states: Tensor) -> Tensor:
        """Rows query | key | value | g | gate | beta ``[s, B, P]``: g is the forget
        gate, gate the output gate, both in full width."""
        return torch.cat(self._project_sections(hidden_states), dim=-1)

    def project_rows_and_gates(
        self, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of :meth:`project`. If in_proj makes both gates, the rows lack beta,
        which is the second tensor ``[s, B, H]``: the front reads it there
        (``gate_rows``), and the rows are not copied. Else the second is None."""
        sections = self._project_sections(hidden_states)
        if self.dims.gates_in_in_proj:
            rows, beta = sections
            return rows, beta
        return torch.cat(sections, dim=-1), None

    def _project_sections(self, x: Tensor) -> list[Tensor]:
        """The columns of a row in order, one tensor per projection of the layer's input
        ``x [s, B, D]``: in_proj; the two gates, unless in_proj makes both; beta."""
        rows, _ = self.in_proj(x)
        sections = [rows]
        if not self.dims.gates_in_in_proj:
            sections.append(self._project_gate("f", x))
            sections.append(self._project_gate("g", x))
        sections.append(self._project_beta(x))
        return sections

    def _project_gate(self, letter: str, x: Tensor) -> Tensor:
        """The forget gate ("f") or output gate ("g") of this rank's heads, ``[S, B,
        C]``, from the layer's input."""
        if hasattr(self, f"{letter}_proj"):
            return getattr(self, f"{letter}_proj")(x)[0]
        narrow_sBR, _ = getattr(self, f"{letter}_a_proj")(x)
        return getattr(self, f"{letter}_b_proj")(narrow_sBR)[0]

    def _project_beta(self, x: Tensor) -> Tensor:
        """The write strengths of this rank's heads, ``[S, B, H]``, before the sigmoid,
        from the layer's input.

        If every tensor-parallel rank has the whole weight, this rank's heads are cut
        out of the product.
        """
        beta, _ = self.beta_proj(x)
        if "beta_proj" not in self._duplicated_projections:
            return beta
        if self.config.sequence_parallel:
            # all heads of some tokens become some heads of all tokens
            beta_TH = all_to_all_sp2hp(beta, self.tp_group)
            return beta_TH.unflatten(0, (-1, x.shape[1]))
        return scatter_to_tensor_model_parallel_region(beta, self.tp_group)

    @property
    def section_outside_fp8(self) -> str:
        """The name "g" of the forget gate's section, if in_proj makes the forget gate;
        else ""."""
        if self.dims.gates_in_in_proj:
            return "g"
        return ""

    def _widths_in_fp8(self) -> dict[str, int]:
        """Name of a matrix, for errors -> its number of columns on this rank, for each
        matrix in an FP8 product. The forget gate and the write strengths are in none."""
        layout = self.dims.layout
        widths = {
            "query, key and value of in_proj": layout.conv_width,
            "the input of out_proj": layout.mixed_width,
        }
        # Output gates in in_proj need no entry: they are as wide as out_proj's input.
        if self.dims.output_rank:
            # the whole weight, which is on every rank
            widths["g_a_proj (output_rank)"] = self.dims.output_rank
        return widths

    def _set_size_attributes(self) -> None:
        """Set sizes under megatron-core's names; ``*_local_tp``: on one tensor-parallel
        rank."""
        all_ranks = self.global_dims
        local = self.dims
        self.hidden_size = all_ranks.hidden_size
        self.conv_kernel_dim = all_ranks.conv_kernel_dim
        self.num_key_heads = all_ranks.num_key_heads
        self.num_value_heads = all_ranks.num_value_heads
        self.key_head_dim = all_ranks.key_head_dim
        self.value_head_dim = all_ranks.value_head_dim
        self.qk_dim = all_ranks.qk_dim
        self.v_dim = all_ranks.v_dim
        self.qk_dim_local_tp = local.qk_dim
        self.v_dim_local_tp = local.v_dim
        self.conv_dim_local_tp = local.layout.conv_width
        self.in_proj_split_names = local.in_proj_layout.names
        self.in_proj_split_sections = local.in_proj_layout.widths
        # Megatron's FSDP checkpoints cut the in_proj of a module with this attribute.
        # Older Megatrons would cut it as Gated DeltaNet's.
        if self.scripts_split_in_proj:
            self.in_proj_dim = all_ranks.in_proj_layout.width

    def _add_projections(
        self, submodules: KimiDeltaAttentionSubmodules, path: str
    ) -> None:
        """Add beta_proj and, unless in_proj makes both gates, the gates' projections;
        with ``muon_per_head`` mark the rows of heads. ``path`` is this module's
        path."""
        if hasattr(self.in_proj, "layer_norm_weight"):
            raise ValueError(
                "in_proj of KimiDeltaAttention begins with a norm, whose output "
                "beta_proj and the gates' projections would not get. Give "
                "TEColumnParallelLinear, and the norm as the layer's input_layernorm."
            )
        dims = self.global_dims
        D = dims.hidden_size
        H, K, V = dims.state_shape[:3]
        self._duplicated_projections = set()
        add = partial(self._add_projection, submodules, path)
        # Optimizers number parameters in this order, so it is part of checkpoints.
        if not dims.gates_in_in_proj:
            self._add_gate_projections(add, "f", dims.forget_rank, H * K)
        add("beta_proj", D, H, bias=self.bias)
        if not dims.gates_in_in_proj:
            self._add_gate_projections(add, "g", dims.output_rank, H * V)
        if self.muon_per_head:
            check_muon_of_heads(self.tp_size)
            self._mark_heads()

    def _mark_heads(self) -> None:
        """Mark the weights whose rows belong to heads, so that Muon orthogonalises the
        rows of each head separately."""
        layout = self.dims.layout
        # for each weight, the sections of a projection row that it computes
        sections_of = {
            "in_proj": self.dims.in_proj_layout.names,
            "f_proj": ("g",),
            "f_b_proj": ("g",),
            "g_proj": ("gate",),
            "g_b_proj": ("gate",),
        }
        linears = self._projections()
        for name, sections in sections_of.items():
            if name not in linears:
                continue
            rows_per_head: list[int] = []
            for section in sections:
                heads, width = layout.shape_of(section)
                rows_per_head += [width] * heads
            mark_heads(linears[name].weight, rows_per_head)

    def _add_gate_projections(
        self, add: Callable[..., None], letter: str, rank: int, width: int
    ) -> None:
        """Add the projections of the forget gate ("f") or output gate ("g") of this
        ``width``; a ``rank`` of 0 means full rank.

        ``add(name, columns, rows)`` is :meth:`_add_projection`.
        """
        D = self.global_dims.hidden_size
        if not rank:
            add(f"{letter}_proj", D, width)
        else:
            add(f"{letter}_a_proj", D, rank)
            add(f"{letter}_b_proj", rank, width)

    def _add_projection(
        self,
        submodules: KimiDeltaAttentionSubmodules,
        path: str,
        name: str,
        columns: int,
        rows: int,
        bias: bool = False,
    ) -> None:
        """Build the linear ``name``, whose whole weight is ``[rows, columns]``, and add
        it to this module.

        If the model may use FP8, only the output gate's linears (``g_*``) do.
        """
        spec = getattr(submodules, name)
        if spec is IdentityOp:
            raise ValueError(
                f"KimiDeltaAttentionSubmodules has no {name}, which this layer needs. "
                "Take megatron_gdn.specs.kimi_delta_attention_spec(), which has all "
                "submodules."
            )
        duplicated = _has_whole_weight(spec)
        if may_use_fp8(self.config) and not name.startswith("g_"):
            spec = spec_outside_fp8(spec)
        if name.endswith("_a_proj") and not duplicated:
            raise ValueError(
                f"{name} of KimiDeltaAttention must have its whole weight on every "
                "tensor-parallel rank. Give Megatron's TELinear, or without "
                "Transformer Engine megatron_gdn.compat.torch_linear.DuplicatedLinear."
            )
        if duplicated:
            parallelism: dict[str, Any] = {
                "parallel_mode": "duplicated",
                "skip_weight_param_allocation": False,
            }
        else:
            parallelism = {
                "gather_output": False,
                "tp_comm_buffer_name": name,
                "tp_group": self.tp_group,
            }
        linear = build_linear(
            spec,
            self.config,
            columns,
            rows,
            init_method=self.config.init_method,
            bias=bias,
            skip_bias_add=False,
            is_expert=False,
            name=f"{path}{name}" if path else None,
            **parallelism,
        )
        if duplicated:
            self._duplicated_projections.add(name)
            # Each rank has the gradient of its own tokens; Megatron sums the ranks'
            # gradients of parameters with this mark.
            for parameter in linear.parameters():
                parameter.sequence_parallel = self.config.sequence_parallel
        self.add_module(name, linear)

    def _projections(self) -> dict[str, Any]:
        """All projections but out_proj, by name."""
        names = ("in_proj", "beta_proj") + _GATE_PROJECTIONS
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def _init_further_parameters(self) -> None:
        """Fill the weights that `_add_projections` added by the config's
        ``init_method``.

        A whole weight is filled without a group: each rank draws the same values.
        """
        method = self.config.init_method
        assert method is not None
        if not self.config.perform_initialization:
            return
        for name, linear in self._projections().items():
            weight = getattr(linear, "weight", None)
            if name == "in_proj" or weight is None:
                continue
            if name in self._duplicated_projections:
                fill_share(None, weight, method, 0, (len(weight),))
            else:
                rows = len(weight) * self.tp_size
                fill_share(self.tp_group, weight, method, 0, (rows,))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **keywords: Any
    ) -> None:
        """Load as torch does; a state dict of version 0.1 is converted first."""
        convert_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)

    def set_for_recompute_input_layernorm(self) -> None:
        """Let every projection of the layer's input save the input itself for the
        backward, not a quantised copy.

        Megatron calls this method if it recomputes ``input_layernorm``: the norm then
        computes the input again before the backward. ``*_b_proj`` is left out: its input
        is the narrow linear's output, not the norm's output.
        """
        from megatron.core.extensions.transformer_engine import set_save_original_input

        for name, linear in self._projections().items():
            if not name.endswith("_b_proj"):
                set_save_original_input(linear)

    def _backward_in_proj(self) -> None:
        """Compute the delayed weight gradients of all projections but out_proj."""
        for linear in self._projections().values():
            linear.backward_dw()


_GATE_PROJECTIONS = ("f_proj", "f_a_proj", "f_b_proj", "g_proj", "g_a_proj", "g_b_proj")


def _config_field_or_flag(config: Any, name: str) -> Any:
    """A field of Megatron's config; if the config lacks the field, the flag of the
    launch with this name, or None.

    ``megatron_gdn.launch`` adds these flags to the scripts of older Megatrons.
    """
    if hasattr(config, name):
        return getattr(config, name)
    return launch_arguments().get(name)


def _has_whole_weight(spec: ModuleSpec | type) -> bool:
    """Whether the linear of ``spec`` has its whole weight on every tensor-parallel
    rank.

    Such a class has the constructor argument ``parallel_mode``; a column-parallel class
    has ``gather_output``. A class that passes arguments on is judged by its base class.
    """
    cls: Any = spec
    if isinstance(spec, ModuleSpec):
        cls = spec.module
    for base in cls.__mro__:
        arguments = signature(base.__init__).parameters
        if "parallel_mode" in arguments:
            return True
        if "gather_output" in arguments:
            return False
    return False
