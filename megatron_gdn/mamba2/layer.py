"""The Mamba2 mixer for Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..mixers.arguments import KnownConfigFields
from ..mixers.fp32_parameters import (
    Fp32Parameter,
    fill_A_log,
    fill_dt_bias,
)
from ..mixers.mamba_layer import MambaLayerMixer, check_time_steps
from ..mixers.options import MixerOptions
from ..ops.stages import front_maker
from .front import mamba2_table
from .rule import RULES, UNLIMITED_TIME_STEPS, choose_ssd
from .sizes import Mamba2Dims, refuse_unsupported_arguments

MAMBA2_CONFIG_FIELDS = KnownConfigFields(
    prefixes=("mamba_", "use_mamba_"),
    with_effect=(
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mamba_state_dim",
    ),
    without_effect={
        "mamba_training_ssm_states_dtype": "the recurrence chooses its states' dtype",
        "use_mamba_mem_eff_path": "convolution and recurrence are always one autograd function",
    },
)


@dataclass
class Mamba2MixerSubmodules:
    """Specs of the two linears, with the names of Megatron's
    ``MambaMixerSubmodules``."""

    in_proj: ModuleSpec | type = IdentityOp
    out_proj: ModuleSpec | type = IdentityOp


@dataclass(frozen=True, kw_only=True)
class Mamba2Options(MixerOptions):
    """The options of a :class:`Mamba2Mixer`.

    With ``linear_cp_mode="headwise"``, heads of one group may be on several ranks; each
    of these ranks holds a copy of the group's B and C.

    Args:
        dt_limit: the least and the greatest time step.
        norm_eps: epsilon of the output norm.
    """

    absent_options = ("rule_operands", "recompute")
    mixer_name = "Mamba2"
    rules = RULES

    dt_limit: tuple[float, float] = UNLIMITED_TIME_STEPS
    norm_eps: float = 1e-5


class Mamba2Mixer(MambaLayerMixer):
    """Mamba2 as a Megatron mixer: ``[s, B, D] -> [s, B, D]``.

        z, x, B, C, dt = in_proj(u)
        x, B, C        = SiLU(causal_conv1d(x, B, C))
        dt             = softplus(dt + dt_bias)           fp32, clamped to dt_limit
        S_t            = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t x_t^T
        y_t            = S_t^T C_t + D x_t
        out            = out_proj(RMSNorm_group(y * SiLU(z)))

    (Dao, Gu, "Transformers are SSMs", 2024.) :mod:`megatron_gdn.mamba2.reference` is
    this equation as code. The constructor, parameters and checkpoint keys are as in
    ``megatron.core.ssm.mamba_mixer.MambaMixer``; ``A_log``, ``dt_bias`` and ``D`` are
    fp32 in memory, in optimizers and in files.

    Args:
        config: gives the ``mamba_*`` sizes.
        submodules: specs of ``in_proj`` and ``out_proj``.
        d_model, d_conv: hidden size, and taps of the convolution.
        expand: d_inner / d_model; used if ``config.mamba_num_heads`` is None.
        D_has_hdim: whether D has a value for every channel, or only one for every head.
        rmsnorm: apply the gate and a norm before ``out_proj``; if False, only the gate.
        norm_before_gate, dt_init, dt_scale, bias: must be False, ``"random"``, 1 and
            False.
        dt_min, dt_max, dt_init_floor: softplus(dt_bias) starts log-uniform between
            ``dt_min`` and ``dt_max``, but not below ``dt_init_floor``.
        chunk_size: Megatron's dynamic context may cut prompts at multiples of this
            number; results do not depend on it.
        options: the fields of :class:`.mixers.options.MixerOptions` and
            :class:`Mamba2Options`, without ``rule_operands`` and ``recompute``;
            ``backend`` is ``"fla"``, ``"reference"`` or ``"auto"``, see
            `megatron_gdn.mamba2.rule`.

    The other arguments are as in :class:`megatron_gdn.GatedDeltaNet`. Pass options
    through ``ModuleSpec(params={...})``.

    Raises:
        ValueError: sizes that do not fit each other or the parallel sizes, or an
            argument that this mixer cannot honour, such as an unknown ``backend`` or
            ``linear_cp_mode``.
        ImportError: the requested backend is not available.
    """

    fp32 = (
        Fp32Parameter(name="A_log", section="dt", first_values=fill_A_log),
        Fp32Parameter(
            name="dt_bias",
            section="dt",
            first_values=fill_dt_bias,
            is_registered_first=True,
        ),
        Fp32Parameter(name="D", section="x", first_values=1.0),
    )
    options_class = Mamba2Options
    known_config_fields = MAMBA2_CONFIG_FIELDS
    recurrence = "SSD"
    state_transposed = True
    D: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Mamba2MixerSubmodules,
        d_model: int,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int | float = 2,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 128,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = 0,
        name: str | None = None,
        **options: object,
    ) -> None:
        """Read sizes and options, then build the projections and parameters; arguments
        as in the class."""
        refuse_unsupported_arguments(norm_before_gate, dt_init, dt_scale, bias)
        given = Mamba2Options.of(options)
        check_time_steps((dt_min, dt_max), dt_init_floor, given.dt_limit)
        super().__init__(
            config,
            Mamba2Dims.from_config(config, d_model, d_conv, expand),
            given,
            layer_number,
            pg_collection,
            pp_layer_offset,
            A_init_range,
            conv_init,
        )
        self.d_model = d_model
        self.d_conv = d_conv
        self.expand = expand
        self.D_has_hdim = D_has_hdim
        if D_has_hdim:
            A_log, dt_bias, D = self.fp32
            self.fp32 = A_log, dt_bias, replace(D, has_value_per_column=True)
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_init_range = (dt_min, dt_max)
        self.dt_init_floor = dt_init_floor
        # a tuple, since front tables are cached by it
        self.dt_limit = given.dt_limit[0], given.dt_limit[1]
        self.norm_eps = given.norm_eps
        self.chunk_size = chunk_size
        self._build(
            submodules,
            partial(choose_ssd, given.backend, self.dims.state_shape),
            front_maker(mamba2_table, dt_limit=self.dt_limit),
            name=name,
            bias=False,
            conv_bias=conv_bias,
        )
