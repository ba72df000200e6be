"""What the recurrent mixers have in common: ranks, sizes, projections, fp32 parameters, files.

Legend: D hidden size, P width of the projection, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from .checkpoint import mixer_sharded_state_dict
from .context_parallel import LinearCpMode, SequenceLayout
from .inference.generating import GeneratingMixer
from .init import device_for
from .loader_layout import AUTO, FollowsLoader, LoaderLayout
from .micro_batch import ChooseRule, MicroBatches
from .ops.rule import Rule
from .parameter_marks import MarkedParameters
from .precision import Fp32Parameters, mark_keep_in_fp32
from .process_groups import FollowsGroups
from .tensor_parallel import mark_packed, mark_sharded


class RecurrentMixer(
    FollowsGroups, FollowsLoader, GeneratingMixer, MarkedParameters, Fp32Parameters, MegatronModule
):
    """A recurrence between two of Megatron's linears: ``[s, B, D] -> [s, B, D]``.

    A mixer calls :meth:`_choose_by`, builds its parameters in the order in which files and
    optimizers shall list them (:meth:`_build_in_proj`, :meth:`_add_fp32`,
    :meth:`_build_out_proj`), calls :meth:`remember_marks` and fills them. It brings ``forward``,
    ``conv_weight`` and ``row_mixer``.

    Args:
        config: Megatron's.
        dims: sizes of the whole mixer: ``hidden_size``, ``conv_kernel_dim``, the ``layout`` of a
            projection row, the ``state`` of its heads; ``shard(n)`` gives those of one of n ranks,
            ``check_fp8_alignment(n)`` refuses a width.
        layer_number, pg_collection, pp_layer_offset, cp_layout: as in
            :class:`megatron_gdn.GatedDeltaNet`.

    Attributes:
        global_dims, dims: of the whole mixer, and of this tensor-parallel rank.
        micro_batches: how each micro-batch runs.

    Raises:
        ValueError: sizes that ``tp`` ranks cannot share or FP8 cannot take, an unknown layout.
    """

    in_proj: Any
    out_proj: Any
    micro_batches: MicroBatches

    def __init__(
        self,
        config: TransformerConfig,
        dims: Any,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = 0,
        cp_layout: str | SequenceLayout = AUTO,
    ) -> None:
        super().__init__(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number, self.pp_layer_offset = layer_number, pp_layer_offset or 0
        self._pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.tp_size = pg_collection.tp.size()
        self.loader_layout = LoaderLayout(cp_layout, config)
        self.global_dims, self.dims = dims, dims.shard(self.tp_size)
        if config.fp8:
            from megatron.core.fp8_utils import get_fp8_align_size

            recipe: Any = config.fp8_recipe
            self.dims.check_fp8_alignment(get_fp8_align_size(recipe))

    def _choose_by(
        self, choose_rule: ChooseRule, mode: str | LinearCpMode | None, **names: str
    ) -> None:
        """Set ``micro_batches``; arguments as of :class:`.micro_batch.MicroBatches`."""
        dims, group = self.dims, self.pg_collection.cp
        self.micro_batches = MicroBatches(
            self.config, dims.layout, dims.state, dims.conv_kernel_dim, group, self.loader_layout,
            mode=mode, choose_rule=choose_rule, **names,
        )  # fmt: skip

    @property
    def config(self) -> TransformerConfig:
        """Megatron's. Replaced or changed, its modes count from the next forward.

        Those are ``deterministic_mode``, ``batch_invariant_mode`` and ``cp_partition_mode``. Sizes,
        parts and their options are those that the mixer was built with.
        """
        return self._config

    @config.setter
    def config(self, config: TransformerConfig) -> None:
        self._config = config
        if "micro_batches" in vars(self):
            self.micro_batches.follow(config)

    @property
    def aligned(self) -> bool:
        return self._config.batch_invariant_mode

    @property
    def rule(self) -> Rule:
        """The recurrence of the last forward; before the first, what is expected to run."""
        return self.micro_batches.latest_rule

    @property
    def backend(self) -> str:
        return self.rule.name

    def _build_in_proj(self, spec: ModuleSpec | type, name: str | None, bias: bool = False) -> None:
        """Set ``in_proj``, D -> P.

        Args:
            name: path of this mixer in the model.
        """
        self.in_proj = build_module(
            spec,
            self.global_dims.hidden_size,
            self.global_dims.layout.width,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp_group,
            name=None if name is None else f"{name}.in_proj",
        )
        mark_packed(self.in_proj, self.dims.layout.widths)

    def _build_out_proj(
        self, spec: ModuleSpec | type, name: str | None, bias: bool = False
    ) -> None:
        """Set ``out_proj``, H V -> D; its bias is handed on, for Megatron to add."""
        state = self.global_dims.state
        self.out_proj = build_module(
            spec,
            state.heads * state.columns,
            self.global_dims.hidden_size,
            config=self.config,
            init_method=self.config.output_layer_init_method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
            name=None if name is None else f"{name}.out_proj",
        )

    def _add_fp32(self, **rows: int) -> None:
        """Add fp32 parameters ``[rows]``, this rank's share each."""
        for name, count in rows.items():
            empty = torch.empty(count, dtype=torch.float32, device=device_for(self.config))
            parameter = nn.Parameter(empty)
            mark_sharded(parameter, (count,))
            mark_keep_in_fp32(parameter)
            self.register_parameter(name, parameter)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """The parameters for Megatron's distributed checkpoints, under its own mixer's keys.

        in_proj and the convolution are stored section by section, so a checkpoint loads at any
        tensor-parallel size; A_log, dt_bias and other fp32 parameters are stored in fp32.
        """
        return mixer_sharded_state_dict(
            self, self.dims.layout, self._keep_in_float32_parameter_names,
            prefix, sharded_offsets, metadata, tp_group,
        )  # fmt: skip
