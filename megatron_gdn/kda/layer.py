"""The Kimi Delta Attention layer for Megatron-Core.

Legend: R columns of a gate's narrow half on all tensor-parallel ranks, C of a gate on
this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..mixers.base import MixerSubmodules, RecurrentMixer
from ..mixers.fp32_parameters import (
    Fp32Parameter,
    biases_of_time_steps,
    log_of_rates,
)
from ..mixers.options import MixerOptions
from ..mixers.tensor_parallel import add_parameter, fill_share
from ..ops.stages import fronts_of
from .front import kda_table
from .rule import RULES, choose_kda
from .sizes import KDADims


class KimiDeltaAttentionSubmodules(MixerSubmodules):
    """Specs of the modules inside a :class:`KimiDeltaAttention`."""


@dataclass(frozen=True, kw_only=True)
class KDAOptions(MixerOptions):
    """The options of a :class:`KimiDeltaAttention`; ``"light"`` recomputes only
    ``out_norm``.

    Args:
        forget_rank, output_rank: columns of the narrow half of the forget gate and of
            the output gate; default the value head's dim, as in Kimi Linear. 0: the
            gate is a full section of ``in_proj``.
        gate_lower_bound: a number below 0 for the gate
            ``g = gate_lower_bound * sigmoid(exp(A_log) (f + dt_bias))``.
    """

    absent = ("rule_operands",)
    mixer = "Kimi Delta Attention"
    rules = RULES

    forget_rank: int | None = None
    output_rank: int | None = None
    gate_lower_bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_lower_bound is not None and not self.gate_lower_bound < 0:
            raise ValueError(
                f"gate_lower_bound={self.gate_lower_bound} must be below 0: it bounds "
                "a log-decay. Use -5, or None for the unbounded gate."
            )


class KimiDeltaAttention(RecurrentMixer):
    """Kimi Delta Attention as a Megatron mixer: ``[s, B, D] -> [s, B, D]``::

        q, k, v, f_a, z_a, b = in_proj(x)
        f, z    = f_a W_f^T, z_a W_z^T                           the gates in full width
        q, k, v = SiLU(causal_conv1d(q, k, v))
        q, k    = q / |q|, k / |k|                               per head
        g_t     = -exp(A_log) softplus(f_t + dt_bias)            log-decay per channel,
                                                                 fp32
        beta_t  = sigmoid(b_t)
        S_t     = Diag(exp(g_t)) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T
        o_t     = S_t^T q_t / sqrt(K)
        y       = out_proj(RMSNorm(o) * sigmoid(z))

    (Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.)

    Args:
        config: has ``hidden_size``, ``layernorm_epsilon`` and the ``linear_*`` sizes.
            Each value head has gates and a state; Kimi Linear has as many key heads as
            value heads.
        A_init_range: as in :class:`megatron_gdn.GatedDeltaNet`; default (1, 16), or (1,
            1) with ``gate_lower_bound``.
        options: the fields of :class:`.mixers.options.MixerOptions` and
            :class:`KDAOptions`; ``backend`` is ``"fla"``, ``"cudnn"`` (Hopper;
            ``"auto"`` never takes it), ``"reference"`` or ``"auto"``, see
            :func:`megatron_gdn.kda.rule.choose_kda`.

    The other arguments are as in :class:`megatron_gdn.GatedDeltaNet`. Pass options
    through ``ModuleSpec(params={...})``.

    Raises:
        ValueError: sizes that do not fit each other or the parallel sizes, or an option
            with an unknown or illegal value, such as ``backend`` or ``A_init_range``.
        NotImplementedError: the config sets ``fp4``, ``fp8``,
            ``linear_allow_neg_eigval`` or ``delay_wgrad_compute``.
        ImportError: the requested backend is not available.
    """

    f_b_weight: nn.Parameter | None
    z_b_weight: nn.Parameter | None

    options_class = KDAOptions
    launch_arguments = ("conv_bias", "conv_init", "A_init_range")
    recurrence: ClassVar[str] = "KDA"
    stays_wide: ClassVar[bool] = True
    fp32 = (
        Fp32Parameter(name="A_log", section="f", first_values=log_of_rates),
        Fp32Parameter(
            name="dt_bias",
            section="f",
            first_values=biases_of_time_steps,
            per_column=True,
            registered_first=True,
        ),
    )
    in_layer_graphs: ClassVar[bool] = True
    dt_init_range = (0.001, 0.1)
    dt_init_floor = 0.0
    output_gate_activation = "sigmoid"
    split_by_heads: ClassVar[tuple[str, ...]] = ("f_b_weight", "z_b_weight")

    def __init__(
        self,
        config: TransformerConfig,
        submodules: KimiDeltaAttentionSubmodules,
        layer_number: int | None = None,
        conv_bias: bool = False,
        conv_init: float | None = None,
        A_init_range: tuple[float, float] | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        name: str | None = None,
        cp_comm_type: str | Sequence[str] | None = None,
        pp_layer_offset: int | None = 0,
        is_mtp_layer: bool = False,
        **options: Any,
    ) -> None:
        """The class documents all arguments."""
        given = KDAOptions.of(options)
        bound = given.gate_lower_bound
        if A_init_range is None:
            if bound is None:
                A_init_range = (1, 16)
            else:
                A_init_range = (1, 1)
        if getattr(config, "linear_allow_neg_eigval", False):
            raise NotImplementedError(
                "linear_allow_neg_eigval=True: write strengths of KimiDeltaAttention "
                "end at 1. Give allow_neg_eigval to the GatedDeltaNet layers alone, by "
                "their spec."
            )
        if getattr(config, "delay_wgrad_compute", False):
            raise NotImplementedError(
                "delay_wgrad_compute: KimiDeltaAttention computes the gradients of its "
                "gates' weights at once. Switch it off."
            )
        super().__init__(
            config,
            KDADims.of(config, given.forget_rank, given.output_rank),
            given,
            layer_number,
            pg_collection,
            pp_layer_offset,
            A_init_range,
            conv_init,
        )
        self.gate_lower_bound = bound
        self._build(
            submodules,
            partial(choose_kda, given.backend, self.dims.state, bound),
            fronts_of(kda_table, lower_bound=bound),
            name=name,
            conv_bias=conv_bias,
        )

    def project(self, hidden_states: Tensor) -> Tensor:
        """Rows query | key | value | f | z | beta ``[s, B, P]``, with gates in full
        width.

        Each tensor-parallel rank computes some columns of the narrow halves, gathers
        ``[s, B, R]``, and computes its heads' columns of the gates with weights
        ``[C, R]``. The narrow halves are saved for the backward. ``in_proj`` itself has
        f_a and z_a in the places of f and z.
        """
        narrow = super().project(hidden_states)
        weights = [w for w in (self.f_b_weight, self.z_b_weight) if w is not None]
        if not weights:
            return narrow
        in_proj = self.dims.in_proj_layout
        row = self.dims.layout
        group = self.tp_group
        sections = list(narrow.split(in_proj.widths, -1))
        halved = [i for i, name in enumerate(row.names) if name != in_proj.names[i]]
        own_columns = torch.cat([sections[i] for i in halved], -1)
        of_ranks = all_gather_last_dim_from_tensor_parallel_region(own_columns, group)
        widths = [in_proj.widths[i] for i in halved]
        lows = of_ranks.unflatten(-1, (group.size(), -1)).split(widths, -1)
        for i, low, weight in zip(halved, lows, weights, strict=True):
            # A copy: a view would keep all of of_ranks in memory, and other strides
            # change bits.
            sections[i] = F.linear(low.flatten(-2).contiguous(), weight)
        return torch.cat(sections, -1)

    def _add_others(self) -> None:
        """Add ``f_b_weight`` and ``z_b_weight``, which widen gates with a narrow
        half."""
        for gate, rank in self.global_dims.ranks.items():
            self.register_parameter(f"{gate}_b_weight", None)
            if rank:
                columns = self.dims.layout.columns(gate)
                add_parameter(
                    self, f"{gate}_b_weight", (columns.stop - columns.start,), rank
                )

    def _init_others(self) -> None:
        """Fill ``f_b_weight`` and ``z_b_weight`` by the config's ``init_method``."""
        assert (method := self.config.init_method) is not None
        layout = self.global_dims.layout
        widths = dict(zip(layout.names, layout.widths, strict=True))
        fill_share(self.tp_group, self.f_b_weight, method, 0, (widths["f"],))
        fill_share(self.tp_group, self.z_b_weight, method, 0, (widths["z"],))
