"""The Mamba2 mixer for Megatron-Core, and its output norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..context_parallel import Scheme
from ..mixers.arguments import ConfigFields
from ..mixers.base import RecurrentMixer
from ..mixers.fp32_parameters import (
    Fp32Parameter,
    biases_of_time_steps,
    log_of_rates,
)
from ..mixers.hooks import only_waits_for_parameters, wait_for_parameters
from ..mixers.options import MixerOptions
from ..mixers.out_norm import PLAIN_FORWARDS, is_plain
from ..mixers.tensor_parallel import device_for, mark_sharded
from ..ops.aligned import apply_token_by_token
from ..ops.readout.base import PassThrough, PlainReadout, SplitReadout, grouped_rms_norm
from ..ops.stages import GatedNorm, fronts_of
from .front import mamba2_table
from .rule import RULES, UNLIMITED, choose_ssd
from .sizes import Mamba2Dims, check_ranges, refuse_unsupported_arguments

MAMBA2_FIELDS = ConfigFields(
    prefixes=("mamba_", "use_mamba_"),
    read=("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_state_dim"),
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

    absent = ("rule_operands", "recompute")
    mixer = "Mamba2"
    rules = RULES

    dt_limit: tuple[float, float] = UNLIMITED
    norm_eps: float = 1e-5


class Mamba2Mixer(RecurrentMixer):
    """Mamba2 as a Megatron mixer: ``[s, B, D] -> [s, B, D]``.

        z, x, B, C, dt = in_proj(u)
        x, B, C        = SiLU(causal_conv1d(x, B, C))
        dt             = softplus(dt + dt_bias)                     time steps, fp32
        S_t            = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t x_t^T
        y_t            = S_t^T C_t + D x_t
        out            = out_proj(RMSNorm_group(y * SiLU(z)))

    (Dao, Gu, "Transformers are SSMs", 2024.) The constructor, parameters and checkpoint
    keys are as in ``megatron.core.ssm.mamba_mixer.MambaMixer``; ``A_log``, ``dt_bias``
    and ``D`` are fp32 in memory, in optimizers and in files.

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
        chunk_size: Megatron's dynamic context may cut prompts at multiples of it; any
            is correct.
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
        Fp32Parameter(name="A_log", section="dt", first_values=log_of_rates),
        Fp32Parameter(
            name="dt_bias",
            section="dt",
            first_values=biases_of_time_steps,
            registered_first=True,
        ),
        Fp32Parameter(name="D", section="x", first_values=1.0),
    )
    options_class = Mamba2Options
    config_fields = MAMBA2_FIELDS
    recurrence = "SSD"
    use_muon = False  # as in Megatron's mixer
    state_transposed = True
    conv_init_of_bias = False
    split_module = "norm"
    split_by_heads = ("norm.weight",)
    D: Tensor
    norm: Any
    # the attention_mask of the MambaLayer that is running
    mask_of_layer: Tensor | None = None

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
        """``d_model``: hidden size. ``d_conv``: taps. ``expand``: d_inner / d_model.
        ``D_has_hdim``: D per channel. ``rmsnorm``: norm before out_proj.
        softplus(dt_bias) starts between ``dt_min`` and ``dt_max``, not below
        ``dt_init_floor``. ``dt_init``, ``dt_scale``, ``norm_before_gate`` and ``bias``
        must have their defaults.
        """
        pass_masks_to_mixers()
        refuse_unsupported_arguments(norm_before_gate, dt_init, dt_scale, bias)
        given = Mamba2Options.of(options)
        check_ranges((dt_min, dt_max), dt_init_floor, given.dt_limit)
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
            self.fp32 = A_log, dt_bias, replace(D, per_column=True)
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_init_range = (dt_min, dt_max)
        self.dt_init_floor = dt_init_floor
        self.dt_limit = given.dt_limit[0], given.dt_limit[1]
        self.norm_eps = given.norm_eps
        self.chunk_size = chunk_size
        self._build(
            submodules,
            partial(choose_ssd, given.backend, self.dims.state),
            fronts_of(mamba2_table, dt_limit=self.dt_limit),
            name=name,
            conv_bias=conv_bias,
        )

    def _name_sizes(self) -> None:
        """Set attributes with sizes, named as in Megatron's mixer, for code that reads
        them."""
        whole = self.global_dims
        local = self.dims
        self.d_state = whole.state_dim
        self.headdim = whole.head_dim
        self.nheads = whole.num_heads
        self.ngroups = whole.num_groups
        self.d_inner = whole.d_inner
        self.nheads_local_tp = local.num_heads
        self.ngroups_local_tp = local.num_groups
        self.d_inner_local_tp = local.d_inner
        self.layout = local.layout

    @wraps(RecurrentMixer.forward)  # other code reads the signature
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is None:
            mask = self.mask_of_layer
        else:
            mask = attention_mask
        return super().forward(hidden_states, mask, *args, **kwargs)

    @property
    def activation(self) -> str:
        """The activation of convolution and gate, under the name of Megatron's
        mixer."""
        return "silu"

    def _build_out_norm(self, submodules: object) -> None:
        """Build ``norm`` for this rank's channels if ``rmsnorm``; ``submodules`` is not
        read."""
        if self.rmsnorm:
            sizes = self.dims
            kind = (device_for(self.config), self.config.params_dtype)
            self.norm = GroupedRMSNorm(
                sizes.d_inner, sizes.num_groups, self.norm_eps, *kind
            )

    @torch.no_grad()
    def _init_others(self) -> None:
        if self.rmsnorm:
            self.norm.weight.fill_(1)

    @property
    def gates_own_rows(self) -> bool:
        """Whether the readout runs after ``passage.close``, and calls the module
        ``norm``."""
        if not self.rmsnorm:
            return False
        plain = is_plain(self.norm) and only_waits_for_parameters(self.norm)
        return not plain or self.norm.groups != self.ngroups_local_tp

    def _norm_for(self, scheme: Scheme) -> GatedNorm | SplitReadout | None:
        """The norm for rows of this scheme; None without ``rmsnorm``.

        The norm needs all heads of a group. If a head exchange puts these heads on
        several ranks, the gate is applied before ``passage.close``, and the norm after
        ``passage.close``.
        """
        if not self.rmsnorm:
            return None
        layout = scheme.layout
        if self.gates_own_rows:
            gate = self.layout.gate_columns
            return SplitReadout(
                PassThrough(layout.gate_columns, layout.state_heads),
                lambda o, rows: self.norm(o, rows[..., gate]).contiguous(),
                closed=True,
            )
        wait_for_parameters(self.norm)
        weight = self.norm.weight
        groups = self.ngroups_local_tp
        eps = self.norm.eps
        own_groups = layout.heads("group")
        if not scheme.moves_rows:
            return GatedNorm(weight, eps, groups=own_groups)
        if own_groups * scheme.size == groups:
            return GatedNorm(scheme.local(weight), eps, groups=own_groups)
        norm = partial(grouped_rms_norm, gamma=weight, groups=groups, eps=eps)
        if self.config.batch_invariant_mode:
            norm = partial(apply_token_by_token, norm)
        return SplitReadout(
            PlainReadout(layout.gate_columns), lambda u, _: norm(u), closed=True
        )


class GroupedRMSNorm(nn.Module):
    """RMSNorm over each group of neighbouring channels of one tensor-parallel rank,
    after a gate.

    u = x * silu(gate)        y = u * rsqrt(mean_group(u^2) + eps) * weight
    """

    def __init__(
        self, channels: int, groups: int, eps: float, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        mark_sharded(self.weight, (channels,))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None:
            return grouped_rms_norm(x, self.weight, self.groups, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        u = x.to(wide) * F.silu(gate.to(wide))
        return grouped_rms_norm(u, self.weight, self.groups, self.eps).to(x.dtype)


PLAIN_FORWARDS[GroupedRMSNorm] = GroupedRMSNorm.forward


@cache
def pass_masks_to_mixers() -> None:
    """Let Megatron's MambaLayer tell a :class:`Mamba2Mixer` its mask, which it would
    drop.

    The mixer refuses the masks that the other mixers refuse, such as those of
    documents.
    """
    theirs = MambaLayer.forward

    @wraps(theirs)
    def forward(
        self: MambaLayer,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if attention_mask is None or not isinstance(self.mixer, Mamba2Mixer):
            return theirs(self, hidden_states, attention_mask, *args, **kwargs)
        self.mixer.mask_of_layer = attention_mask
        try:
            return theirs(self, hidden_states, attention_mask, *args, **kwargs)
        finally:
            self.mixer.mask_of_layer = None

    MambaLayer.forward = forward
