"""The Gated DeltaProduct layer for Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from ..gdn.rule import RULES
from ..mixers.arguments import KnownConfigFields
from ..mixers.fp32_parameters import (
    Fp32Parameter,
    fill_A_log,
    fill_dt_bias,
)
from ..mixers.mamba_layer import MambaLayerMixer, check_time_steps
from ..mixers.options import MixerOptions
from ..ops.delta_rule.base import HeadSizes
from ..ops.rules.base import Bits
from ..ops.rules.choice import Choice, choose
from ..ops.rules.steps import RuleOfSteps
from ..ops.stages import front_maker
from .front import gdp_table
from .sizes import GDPDims

GDP_CONFIG_FIELDS = KnownConfigFields(
    prefixes=("gdp_", "mamba_"),
    with_effect=(
        "gdp_num_householder",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mamba_state_dim",
    ),
    without_effect={
        "gdp_cutedsl_kernel": "the option backend chooses the rule",
        "gdp_num_chunk_states_to_recompute": "the rule chooses which states it keeps",
        "mamba_training_ssm_states_dtype": "the rule chooses its states' dtype",
    },
)
# The part of the mixer that each name of `--recompute-modules` computes again.
RECOMPUTE_MODULES = {"gdp_in_proj": "layer", "gdp_qkv": "qkv"}


@dataclass
class GatedDeltaProductSubmodules:
    """Specs of the two linears, with the names of Megatron's
    ``GatedDeltaProductMixerSubmodules``."""

    in_proj: ModuleSpec | type = IdentityOp
    out_proj: ModuleSpec | type = IdentityOp


@dataclass(frozen=True, kw_only=True)
class GDPOptions(MixerOptions):
    """The options of a :class:`GatedDeltaProduct`.

    Args:
        num_householder: updates of the state per token; default
            ``config.gdp_num_householder``, or 3 if the config has no such field, as in
            Megatron.
    """

    absent_options = ("rule_operands",)
    mixer_name = "Gated DeltaProduct"
    rules = RULES

    num_householder: int | None = None


class GatedDeltaProduct(MambaLayerMixer):
    """Gated DeltaProduct as a Megatron mixer: ``[s, B, D] -> [s, B, D]``::

        z, v_1 .. v_n, k_1 .. k_n, q, b_1 .. b_n, a = in_proj(x)
        v, k, q   = SiLU(causal_conv1d(v, k, q))
        q, k_j    = q / |q|, k_j / |k_j|                       per group
        g_t       = -exp(A_log) softplus(a_t + dt_bias)        log-decay, fp32
        beta_tj   = sigmoid(b_tj)
        S_t       = exp(g_t) S_{t-1}
        S_t      += beta_tj k_tj (v_tj - S_t^T k_tj)^T         for j = 1 .. n
        o_t       = S_t^T q_t / sqrt(K)
        y         = out_proj(RMSNorm_group(o * SiLU(z)))

    (Siems et al., "DeltaProduct", 2025.) :mod:`megatron_gdn.gdp.reference` is this
    equation as code. The constructor, parameters and checkpoint keys are as in
    ``megatron.core.ssm.gated_delta_product.GatedDeltaProductMixer``; ``A_log`` and
    ``dt_bias`` are fp32 in memory, in optimizers and in files.

    Args:
        config: gives the ``mamba_*`` sizes; each of ``mamba_num_groups`` groups of
            heads has its own query and keys, of ``mamba_state_dim`` columns.
        submodules: specs of ``in_proj`` and ``out_proj``.
        d_model, d_conv: hidden size, and taps of the convolution.
        A_init_range: initial decay rates exp(A_log) are drawn from U(low, high).
        D_has_hdim: has no effect, as in Megatron.
        rmsnorm, norm_before_gate: must be True and False.
        dt_min, dt_max, dt_init_floor: softplus(dt_bias) starts log-uniform between
            ``dt_min`` and ``dt_max``, but not below ``dt_init_floor``.
        chunk_size: Megatron's dynamic context may cut prompts at multiples of this
            number; results do not depend on it.
        options: the fields of :class:`.mixers.options.MixerOptions` and
            :class:`GDPOptions`, without ``rule_operands``; ``backend`` is as in
            :class:`megatron_gdn.GatedDeltaNet`, whose rules run here over n rows per
            token, one for each update.

    The other arguments are as in :class:`megatron_gdn.GatedDeltaNet`. Pass options
    through ``ModuleSpec(params={...})``.

    Raises:
        ValueError: sizes that do not fit each other or the parallel sizes, or an
            argument that this mixer cannot honour, such as ``rmsnorm=False`` or an
            unknown ``backend``.
        ImportError: the requested backend is not available.
    """

    fp32 = (
        Fp32Parameter(name="A_log", section="a", first_values=fill_A_log),
        Fp32Parameter(
            name="dt_bias",
            section="a",
            first_values=fill_dt_bias,
            is_registered_first=True,
        ),
    )
    options_class = GDPOptions
    known_config_fields = GDP_CONFIG_FIELDS
    recompute_modules = RECOMPUTE_MODULES
    allows_zero_in_A_init_range = True
    conv_is_module = True
    norm_eps = 1e-5

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaProductSubmodules,
        d_model: int,
        d_conv: int = 4,
        conv_init: float | None = None,
        A_init_range: tuple[float, float] = (0, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        bias: bool = False,
        conv_bias: bool = False,
        chunk_size: int = 128,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = 0,
        name: str | None = None,
        **options: object,
    ) -> None:
        """Read sizes and options, then build the projections and parameters; arguments
        as in the class."""
        if not rmsnorm or norm_before_gate:
            raise ValueError(
                f"rmsnorm={rmsnorm}, norm_before_gate={norm_before_gate}: a "
                "GatedDeltaProduct gates its output, then norms it. Leave both out."
            )
        given = GDPOptions.of(options)
        check_time_steps((dt_min, dt_max), dt_init_floor)
        num_householder = given.num_householder
        if num_householder is None:
            num_householder = getattr(config, "gdp_num_householder", 3)
        super().__init__(
            config,
            GDPDims.from_config(config, d_model, d_conv, num_householder),
            given,
            layer_number,
            pg_collection,
            pp_layer_offset,
            A_init_range,
            conv_init,
        )
        self.d_model = d_model
        self.d_conv = d_conv
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_init_range = (dt_min, dt_max)
        self.dt_init_floor = dt_init_floor
        self.chunk_size = chunk_size
        self.num_householder = num_householder
        self._build(
            submodules,
            partial(choose_gdp, given.backend, self.dims.heads, num_householder),
            front_maker(gdp_table, recompute_qkv=self.recompute_qkv),
            name=name,
            bias=bias,
            conv_bias=conv_bias,
        )


def choose_gdp(
    backend: str,
    sizes: HeadSizes,
    steps: int,
    device: torch.device,
    dtype: torch.dtype,
    bits: Bits = Bits.FREE,
) -> Choice:
    """Choose the rule: a rule of Gated DeltaNet, which then runs over ``steps`` rows
    for each token, one row for each update.

    ``backend`` is ``"flash_qla"``, ``"fla"``, ``"reference"`` (plain torch) or
    ``"auto"``: the first of this list that runs here.

    ``bits`` is what the rule must promise (:class:`..ops.rules.base.Bits`).

    Raises:
        ValueError: an unknown backend, or a backend that does not support these heads,
            this dtype, this device or ``bits``.
        ImportError: the backend's package is missing, too old, or computes wrong
            results here.
    """
    rule, reason = choose(
        backend,
        "Gated DeltaProduct",
        RULES,
        device=device,
        dtype=dtype,
        sizes=sizes,
        bits=bits,
    )
    return Choice(RuleOfSteps(rule, steps), reason)
