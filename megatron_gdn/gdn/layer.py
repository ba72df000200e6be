"""The Gated DeltaNet layer for Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from ..mixers.base import MixerSubmodules
from ..mixers.fp32_parameters import Fp32Parameter, fill_A_log, fill_with_ones
from ..mixers.options import MixerOptions
from ..ops.readout.base import ACTIVATIONS
from ..ops.stages import front_maker
from .front import gdn_table
from .rule import RULES, require_operands, resolve_rule
from .sizes import GDNDims
from .upstream_names import UpstreamNames


class GatedDeltaNetSubmodules(MixerSubmodules):
    """Specs of the modules inside a :class:`GatedDeltaNet`."""


@dataclass(frozen=True, kw_only=True)
class GDNOptions(MixerOptions):
    """The options of a :class:`GatedDeltaNet`.

    Args:
        output_gate_activation: the activation of z, ``"silu"`` or ``"sigmoid"``
            (Qwen3.8-Flash-Next); default ``config.gdn_output_gate_activation`` or
            ``"silu"``.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1), so that a token may reverse
            a direction of the state (OLMo Hybrid); default
            ``config.linear_allow_neg_eigval`` or False.
    """

    mixer_name = "Gated DeltaNet"
    rules = RULES

    output_gate_activation: str | None = None
    allow_neg_eigval: bool | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for unknown operands or an unknown activation."""
        super().__post_init__()
        require_operands(self.rule_operands)
        if self.output_gate_activation is not None:
            _require_activation(self.output_gate_activation)


def _require_activation(name: str) -> None:
    """Raise a ValueError for an activation that the readout does not have."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"output_gate_activation={name!r}; use one of "
            f"{', '.join(map(repr, ACTIVATIONS))}."
        )


class GatedDeltaNet(UpstreamNames):
    """Gated DeltaNet as a Megatron mixer: ``[s, B, D] -> [s, B, D]``.

    The layer projects, convolves, runs the gated delta rule and projects back:

        q, k, v, z, b, a = in_proj(x)
        q, k, v          = SiLU(causal_conv1d(q, k, v))
        q, k             = q / |q|, k / |k|                      per head
        g_t              = -exp(A_log) softplus(a_t + dt_bias)   log-decay, fp32
        beta_t           = sigmoid(b_t)                          or 2 sigmoid(b_t)
        S_t              = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
        o_t              = S_t^T q_t / sqrt(K)
        y                = out_proj(RMSNorm(o) * act(z))         act: SiLU, or the
                                                                 sigmoid

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    2024.) :mod:`megatron_gdn.gdn.reference` is this equation as code. Constructor,
    parameters and checkpoint keys are those of ``megatron.core.ssm.gated_delta_net``.

    :class:`megatron_gdn.mixers.base.RecurrentMixer` has the forward, with the
    documents' boundaries and the exchanges of context parallelism. The gates' functions
    are in :mod:`megatron_gdn.ops.front.gates`; :mod:`megatron_gdn.gdn.front` names the
    function of each gate.

    Args:
        config: has ``hidden_size``, ``layernorm_epsilon`` and the ``linear_*`` sizes.
        layer_number: number of this layer in the model, from 1.
        bias, conv_bias: whether the projections have biases, and whether the
            convolution has one.
        conv_init: draw convolution weights from U(-conv_init, conv_init); default 1 /
            sqrt(W).
        use_qk_l2norm: scale query and key heads to unit length.
        A_init_range: initial decay rates exp(A_log) are drawn from U(low, high), low >
            0.
        pg_collection: process groups (``tp`` and ``cp`` are used); default: Megatron's
            global ones.
        name: path of this module in the model, for TE's precision settings.
        pp_layer_offset: number of layers on earlier pipeline stages. Megatron's
            ``DynamicInferenceContext`` counts only the layers of this stage.
        cp_comm_type, is_mtp_layer: have no effect; Megatron passes them to every such
            layer.
        options: the fields of :class:`.mixers.options.MixerOptions` and
            :class:`GDNOptions`, such as ``backend`` and ``linear_cp_mode``; ``backend``
            is ``"flash_qla"``, ``"fla"``, ``"reference"`` or ``"auto"``, see
            :func:`megatron_gdn.gdn.rule.resolve_rule`.

    Pass options through ``ModuleSpec(params={...})``.

    Raises:
        ValueError: sizes that do not fit each other or the parallel sizes, an unknown
            backend, layout, mode or activation, a bad ``A_init_range`` or
            ``cp_ranks_per_machine``, contradictory settings of recomputation, a config
            of the variant ``gdn2``, or Megatron's CUDA graphs of layers together with
            hybrid context parallelism.
        ImportError: the requested backend is not available.
    """

    options_class = GDNOptions
    launch_arguments = (
        "bias",
        "conv_bias",
        "conv_init",
        "use_qk_l2norm",
        "A_init_range",
    )
    # One value per value head. The sections "alpha" and "beta" of a projection row are
    # a and b in the equation.
    fp32 = (
        Fp32Parameter(name="A_log", section="alpha", first_values=fill_A_log),
        Fp32Parameter(
            name="dt_bias",
            section="alpha",
            first_values=fill_with_ones,
            is_registered_first=True,
        ),
    )
    may_be_captured: ClassVar[bool] = True
    scripts_split_in_proj: ClassVar[bool] = True
    conv_is_module = True

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
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
        if config.experimental_attention_variant == "gdn2":
            raise ValueError(
                "experimental_attention_variant='gdn2' asks for Gated DeltaNet 2, and "
                "this layer is Gated DeltaNet ('gdn', 'gated_delta_net' in older "
                "Megatrons), which has other gates and parameters. Change the variant, "
                "or build megatron_gdn.GatedDeltaNet2."
            )
        given = GDNOptions.of(options)
        super().__init__(
            config,
            GDNDims.from_config(config),
            given,
            layer_number,
            pg_collection,
            pp_layer_offset,
            A_init_range,
            conv_init,
        )
        self.bias = bias
        self.conv_bias = conv_bias
        self.use_qk_l2norm = use_qk_l2norm
        config_activation = getattr(config, "gdn_output_gate_activation", None)
        self.output_gate_activation = (
            given.output_gate_activation or config_activation or "silu"
        )
        _require_activation(self.output_gate_activation)
        allow_neg_eigval = given.allow_neg_eigval
        if allow_neg_eigval is None:
            allow_neg_eigval = getattr(config, "linear_allow_neg_eigval", False)
        self.allow_neg_eigval = bool(allow_neg_eigval)
        choose_rule = partial(
            resolve_rule,
            given.backend,
            sizes=self.dims.heads,
            operands=given.rule_operands,
            normalise_qk=use_qk_l2norm,
        )
        make_front = front_maker(
            gdn_table,
            normalise_qk=use_qk_l2norm,
            allow_neg_eigval=self.allow_neg_eigval,
            recompute_qkv=self.recompute_qkv,
        )
        self._build(
            submodules,
            choose_rule,
            make_front,
            name=name,
            bias=bias,
            conv_bias=conv_bias,
        )
