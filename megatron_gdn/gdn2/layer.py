"""The Gated DeltaNet-2 layer for Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from ..mixers.base import MixerSubmodules, RecurrentMixer
from ..mixers.fp32_parameters import (
    Fp32Parameter,
    fill_A_log,
    fill_dt_bias,
)
from ..mixers.options import MixerOptions
from ..ops.stages import front_maker
from .front import gdn2_table
from .rule import RULES, choose_gdn2
from .sizes import GDN2Dims


@dataclass(frozen=True, kw_only=True)
class GDN2Options(MixerOptions):
    """The options of a :class:`GatedDeltaNet2`."""

    absent_options = ("rule_operands",)
    mixer_name = "Gated DeltaNet-2"
    rules = RULES


class GatedDeltaNet2(RecurrentMixer):
    """Gated DeltaNet-2 as a Megatron mixer: ``[s, B, D] -> [s, B, D]``::

        q, k, v, z, f, b, w = in_proj(x)
        q, k, v = SiLU(causal_conv1d(q, k, v))
        q, k    = q / |q|, k / |k|                            per head
        g_t     = -exp(A_log) softplus(f_t + dt_bias)         log-decay per key channel,
                                                              fp32
        b_t, w_t = sigmoid(b_t), sigmoid(w_t)                 erase and write gate, per
                                                              channel
        S_t     = Diag(exp(g_t)) S_{t-1}
        S_t    += k_t (w_t * v_t - S_t^T (b_t * k_t))^T
        o_t     = S_t^T q_t / sqrt(K)
        y       = out_proj(RMSNorm(o) * SiLU(z))

    Each key head, with its decay and its erase gate, serves the same number of
    neighbouring value heads. :mod:`megatron_gdn.gdn2.reference` is this equation as
    code. Constructor, parameters and checkpoint keys are those of ``GatedDeltaNet2`` in
    ``megatron.core.ssm.gated_delta_net``.

    Args:
        options: the fields of :class:`.mixers.options.MixerOptions`, without
            ``rule_operands``; ``backend`` is ``"fla"`` (fla's kernels, on a GPU),
            ``"reference"`` or ``"auto"``, see `megatron_gdn.gdn2.rule`.

    Other arguments are those of :class:`megatron_gdn.GatedDeltaNet`. The backward
    always computes the gates again. Pass options through ``ModuleSpec(params={...})``.

    Raises:
        ValueError: sizes that do not fit each other or the parallel sizes, an unknown
            backend, layout, mode or ``recompute``, a bad ``A_init_range`` or
            ``cp_ranks_per_machine``.
        ImportError: the requested backend is not available.
    """

    options_class = GDN2Options
    launch_arguments = (
        "bias",
        "conv_bias",
        "conv_init",
        "use_qk_l2norm",
        "A_init_range",
    )
    recurrence: ClassVar[str] = "GDN-2"
    fp32 = (
        Fp32Parameter(name="A_log", section="f", first_values=fill_A_log),
        Fp32Parameter(
            name="dt_bias",
            section="f",
            first_values=fill_dt_bias,
            has_value_per_column=True,
            is_registered_first=True,
        ),
    )
    may_be_captured: ClassVar[bool] = True
    conv_is_module = True
    dt_init_range = (0.001, 0.1)
    dt_init_floor = 1e-4

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
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
        given = GDN2Options.of(options)
        super().__init__(
            config,
            GDN2Dims.from_config(config),
            given,
            layer_number,
            pg_collection,
            pp_layer_offset,
            A_init_range,
            conv_init,
        )
        self.use_qk_l2norm = use_qk_l2norm
        choose_rule = partial(choose_gdn2, given.backend, self.dims.state_shape)
        make_front = front_maker(
            gdn2_table, normalise_qk=use_qk_l2norm, recompute_qkv=self.recompute_qkv
        )
        self._build(
            submodules,
            choose_rule,
            make_front,
            name=name,
            bias=bias,
            conv_bias=conv_bias,
        )
