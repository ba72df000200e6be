"""The base class of the recurrent mixers, with the forward that all of them
use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint, is_checkpointing
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..compat.observe import log_once, nvtx_range_of
from ..compat.tested import warn_of_untested
from ..context_parallel import Scheme, SequenceLayout
from ..context_parallel.scheme import local_conv_parameters
from ..ops.autograd import uncompiled
from ..ops.layout import layout_of_in_proj
from ..ops.mixer import mix
from ..ops.readout.base import SplitReadout
from ..ops.recompute import RefilledOutput, saved_tensors_are_hooked
from ..ops.rules.base import Rule
from ..ops.stages import GatedNorm, MakeFront, Stages, stages_of
from .arguments import (
    GDN_CONFIG_FIELDS,
    RECOMPUTE_MODULES,
    KnownConfigFields,
    check_config_fields,
    recomputed_parts,
    refuse_unsupported,
    require_causal,
)
from .checkpoint import add_row_order, require_row_order, sharded_state_dict
from .fp8 import (
    GatesOutsideFP8,
    build_linear,
    check_fp8_settings,
    keep_unquantised_input,
    may_use_fp8,
    set_gate_columns,
    widths_in_fp8,
    with_gates_outside_fp8,
)
from .fp32_parameters import Fp32Parameter
from .generation import (
    decode_requests,
    generate,
    prefill_requests,
    state_shapes_per_request,
)
from .graphs import check_layer_graph, refuse_replayed_boundaries
from .hooks import read_conv_module
from .loader_layout import LoaderLayout
from .micro_batch import ChooseRule, MicroBatch, MicroBatchPlanner
from .options import MixerOptions
from .out_norm import norm_for_stages
from .precision import SeparatelyShardedFp32
from .rotary_lengths import explain_rotary_lengths
from .tensor_parallel import (
    MarkedParameters,
    add_conv,
    add_fp32,
    copy_with_same_groups,
    cp_group_of,
    mark_packed,
    require_same_tensor_ranks,
    reset_parameters,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..compat.state_dict import StateDict

warn_of_untested("python")
warn_of_untested("torch")
warn_of_untested("megatron-core", megatron_version)


@dataclass
class MixerSubmodules:
    """Specs of the modules inside a mixer."""

    # column-parallel, hidden -> P; may begin with a norm
    in_proj: ModuleSpec | type = IdentityOp
    out_norm: ModuleSpec | type = IdentityOp  # norm over the V columns of one head
    out_proj: ModuleSpec | type = IdentityOp  # row-parallel, H * V -> hidden


class RecurrentMixer(MarkedParameters, SeparatelyShardedFp32, MegatronModule):
    """A recurrence between two of Megatron's linears: ``[s, B, D] -> [s, B, D]``.

    A subclass's ``__init__`` calls this ``__init__``, sets options and calls
    :meth:`_build`. It gives :meth:`_build` a function that chooses the rule and a
    function that makes the front. The front computes the rule's inputs from projection
    rows.

    A new gate of a Gated DeltaNet needs:

        columns of in_proj     HeadSizes.layout in ops/delta_rule/base.py; gates are
                               the last sections of a row
        a function             ops/front/gates.py, and with its backward in Triton
                               gate_kernels.py (else the whole front runs in torch)
        a line in the front    the table in gdn/front.py
        an input of the rule   a type beside RuleInputs of ops/delta_rule/base.py, and
                               every rule; Kimi Delta Attention and Gated DeltaProduct
                               have RuleInputs too, Gated DeltaNet-2 has its own type
        a Hugging Face name    gdn/hf.py; Megatron's names: gdn/upstream_names.py

    The decode step takes the first gate of a front as the log-decay, the last as the
    write strength, and a gate between them as the erase gate. Exactly one gate of a
    front has ``A_log`` and ``dt_bias``. A second gate with a parameter of its own needs
    a new field of :class:`..ops.front.table.FrontParameters`, and a change of the
    front's kernels.

    Document boundaries enter :meth:`forward` with ``packed_seq_params``.
    :meth:`.micro_batch.MicroBatchPlanner.of` reads them, and
    ``passage.sequence_context`` brings them to convolution and rule. Under context
    parallelism the planner of one layer also compares the ranks' micro-batches, by a
    small all-gather in each forward (:mod:`..context_parallel.agreement`).

    ``dims`` are the sizes of the mixer: ``hidden_size``, ``conv_kernel_dim``, the
    ``layout`` of a projection row, the ``state_shape`` of the heads, and the
    ``in_proj_layout`` if the columns of in_proj differ from that row. ``dims.shard(n)``
    are the sizes on one of n ranks.

    Between in_proj and the convolution, ``to_stages`` of the micro-batch's *passage*
    (:class:`..context_parallel.scheme.Passage`) takes rows to the ranks that run them;
    before out_proj ``from_stages`` takes the output back. In the scheme headwise both
    exchange heads; in the other schemes rows stay where they are.

    Legend: s tokens of this rank, S tokens that the rule sees, B batch, D hidden size,
    P columns of a projection row on this tensor-parallel rank, p columns after
    ``passage.to_stages`` (fewer if heads are exchanged), H heads with a state, V
    columns of one head, C channels and W taps of the convolution.
    """

    in_proj: Any
    out_proj: Any
    out_norm: Any
    conv1d: nn.Conv1d
    conv1d_weight: nn.Parameter
    conv1d_bias: nn.Parameter | None
    micro_batches: MicroBatchPlanner
    options_class: ClassVar[type[MixerOptions]] = MixerOptions
    # Arguments of Megatron's constructor that a launch may set by MEGATRON_GDN_OPTIONS
    # too.
    launch_arguments: ClassVar[tuple[str, ...]] = ()
    # the config's fields about this mixer
    known_config_fields: ClassVar[KnownConfigFields] = GDN_CONFIG_FIELDS
    # the name of the recurrence in log and error messages
    recurrence: ClassVar[str] = "delta rule"
    # the fp32 parameters, in the order in which the front takes them
    fp32: tuple[Fp32Parameter, ...] = ()
    # whether A_init_range may begin at 0
    allows_zero_in_A_init_range: ClassVar[bool] = False
    # the part that each name of `--recompute-modules` computes again
    recompute_modules: ClassVar[Mapping[str, str]] = RECOMPUTE_MODULES
    # Megatron's graphs of layers read the next two attributes: masks are causal, so a
    # graph needs no buffer for a mask.
    attn_mask_type: ClassVar[AttnMaskType] = AttnMaskType.causal
    uses_attention_mask: ClassVar[bool] = False
    # Whether Muon updates in_proj, section by section. If False, Adam does, in
    # Megatrons after 0.19.
    use_muon: ClassVar[bool] = True
    # whether Megatron may capture the mixer in a CUDA graph of the layer
    may_be_captured: ClassVar[bool] = False
    # whether the convolution's parameters are in a submodule conv1d, as in Megatron's
    # Gated DeltaNet
    conv_is_module: ClassVar[bool] = False
    # whether the argument conv_init also bounds the convolution's first bias
    conv_init_bounds_bias: ClassVar[bool] = True
    # whether Megatron's scripts store each section of in_proj by itself
    scripts_split_in_proj: ClassVar[bool] = False
    # Names of parameters whose rows belong to heads, except the fp32 parameters and the
    # convolution's.
    parameters_split_by_heads: ClassVar[tuple[str, ...]] = ()
    # whether Megatron's dynamic context stores a state as [H, V, K], not [H, K, V]
    state_transposed: ClassVar[bool] = False
    # Megatron's dynamic context may cut prompts at multiples of this number. The number
    # must be equal in all recurrent layers of a model.
    chunk_size: int = 128
    output_gate_activation: str = "silu"  # activation of the output gate z
    # What the backward computes again, by the option `recompute` and Megatron's flags:
    recompute_layer: bool  # everything, from the layer's input on
    recompute_norm_out: bool = False  # out_proj's input
    recompute_rule: bool  # the results of front and rule
    recompute_qkv: bool  # the rule's inputs k and v (q: always)
    # With recompute_norm_out: this object frees the memory of out_proj's input after a
    # forward. Before out_proj's backward it fills the memory with the same bits. The
    # attribute has Megatron's name.
    norm_out_checkpoint: RefilledOutput | None = None

    def __init_subclass__(cls, **settings: object) -> None:
        """List the names in ``fp32`` for :class:`.precision.Fp32Parameters`, and for
        Megatron-Bridge."""
        super().__init_subclass__(**settings)
        cls._keep_in_float32_parameter_names = tuple(x.name for x in cls.fp32)

    def __init__(
        self,
        config: TransformerConfig,
        dims: Any,
        options: MixerOptions,
        layer_number: int | None,
        pg_collection: ProcessGroupCollection | None,
        pp_layer_offset: int | None,
        A_init_range: tuple[float, float],
        conv_init: float | None,
    ) -> None:
        """Check the settings and set sizes and groups; :meth:`_build` makes parameters.

        Args:
            dims: the sizes of the mixer over all tensor-parallel ranks.
            options: the values of this package's options.
            layer_number: the layer's number in the model, from 1 on.
            pg_collection: has the groups ``tp`` and ``cp``; None: Megatron's global
                groups.
            pp_layer_offset: the number of layers on earlier pipeline stages.
            A_init_range: the interval of the first decay rates exp(A_log).
            conv_init: the first weights of the convolution are U(-conv_init,
                conv_init); None: 1 / sqrt(W).
        """
        super().__init__(config)
        # the first mixer changes Megatron's errors about rotary positions
        explain_rotary_lengths()
        class_name = type(self).__name__
        low, high = A_init_range
        from_zero = self.allows_zero_in_A_init_range and low == 0 < high
        if not (0 < low <= high or from_zero):
            sign = "<=" if self.allows_zero_in_A_init_range else "<"
            raise ValueError(
                f"A_init_range={tuple(A_init_range)} must be (low, high) with 0 {sign} "
                "low <= high: A_log starts as the logarithm of a number drawn from it."
            )
        self.options = options
        recomputed = frozenset()
        if "recompute" in options.names():
            recomputed = recomputed_parts(
                config, options.recompute, self.recompute_modules
            )
        self.recompute_layer = "layer" in recomputed
        self.recompute_rule = "rule" in recomputed
        self.recompute_qkv = "qkv" in recomputed
        self._wants_norm_out_recompute = "norm_out" in recomputed
        check_config_fields(class_name, self.known_config_fields, config)
        if self.may_be_captured:
            check_layer_graph(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number = layer_number
        self.pp_layer_offset = pp_layer_offset or 0
        self._pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.tp_size = pg_collection.tp.size()
        self.loader_layout = LoaderLayout(options.cp_layout, config)
        self.global_dims = dims
        self.dims = dims.shard(self.tp_size)  # of this tensor-parallel rank
        self.A_init_range = tuple(A_init_range)
        self.conv_init = conv_init
        heads_text = self.dims.layout.heads_text
        check_fp8_settings(config, class_name, self._widths_in_fp8(), heads_text)
        self._set_size_attributes()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: BaseInferenceContext | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer over a batch of sequences, or over packed documents.

        Args:
            hidden_states: ``[s, B, D]`` of this rank's s tokens; B is 1 for packed
                documents.
            attention_mask: None or a causal mask
                (:func:`.arguments.require_causal`).
            inference_context: Megatron's context with the states to continue, without
                gradients (:func:`.generation.generate`); its old name is
                ``inference_params``.
            packed_seq_params: boundaries of packed documents (``qkv_format="thd"``,
                global offsets); it may name the micro-batch's context-parallel group.
            sequence_len_offset: must be None.
            pg_collection: process groups of this forward. The context-parallel group is
                that of ``packed_seq_params``, else ``pg_collection.cp``, else the
                mixer's.
            kwargs: keywords of attention, which change nothing here; another keyword
                raises a TypeError.

        Returns:
            ``[s, B, D]``, and the output bias (or None), which Megatron adds later.

        Raises:
            ValueError: sizes, boundaries or lengths do not fit, or an fp32 parameter
                was rounded.
            NotImplementedError: the mixer cannot honour a mask, a context or a CUDA
                graph.
        """
        if kwargs or sequence_len_offset is not None:
            refuse_unsupported(sequence_len_offset, kwargs)
        if inference_context is None:
            context = inference_params
        else:
            context = inference_context
        if inference_params is not None and inference_params is not context:
            raise ValueError(
                "inference_context and inference_params (its old name) are two "
                "different objects; give one."
            )
        cp_group = self._pg_collection.cp
        if pg_collection is not None:
            cp_group = cp_group_of(self, pg_collection, context)
        graphs = self.may_be_captured and self._config.cuda_graph_impl != "none"
        if graphs and packed_seq_params is not None and context is None:
            refuse_replayed_boundaries(self._config, packed_seq_params)
        # If the input needed no gradient, a checkpoint would give the parameters no
        # gradient. Inside of a checkpoint the layer is computed again anyway.
        trains = self.training and hidden_states.requires_grad
        if (
            self.recompute_layer
            and trains
            and context is None
            and not is_checkpointing()
        ):
            keywords = {
                "packed_seq_params": packed_seq_params,
                "pg_collection": pg_collection,
            }
            rerun = partial(self.forward, attention_mask=attention_mask, **keywords)
            distribute_saved_activations = False
            return checkpoint(rerun, distribute_saved_activations, hidden_states)
        gates = None
        with nvtx_range_of(self, "in_proj"):
            if context is None:
                rows, gates = self.project_rows_and_gates(hidden_states)
            else:
                rows = self.project(hidden_states)
        if context is not None:
            mixed = generate(self, rows, context, attention_mask, packed_seq_params)
            with nvtx_range_of(self, "out_proj"):
                return self.out_proj(mixed)
        batch = self.micro_batches.of(packed_seq_params, rows, cp_group)
        # An exchange, or a rule in batch_invariant_mode, needs all columns in one
        # tensor.
        if gates is not None and not batch.front_reads_in_proj_output:
            rows = torch.cat([rows, gates], dim=-1)
            gates = None
        if attention_mask is not None:
            require_causal(
                attention_mask, rows.shape[1], batch.tokens, batch.local_positions
            )
        own_rows = None
        if self.gate_reads_own_rows:
            own_rows = rows
        # Headwise exchanges rows here. Before, a rank has all columns of s tokens;
        # after, it has the columns of some heads for all S tokens.
        if batch.scheme.exchanges_heads:
            with nvtx_range_of(self, "to_heads"):
                rows = batch.passage.to_stages(rows)
        with nvtx_range_of(self, "mixer"):
            mixed, refilled = self._mix(rows, batch, own_rows, gates)
        with nvtx_range_of(self, "out_proj"):
            out_sBD, out_bias = self.out_proj(mixed)
        if refilled is not None:
            refilled.drop_until_backward_of(out_sBD)
        if out_bias is not None and not torch.is_grad_enabled():
            # A reentrant checkpoint gives every output a backward. The bias parameter
            # would then not be a leaf, and the backward would enter the checkpoint
            # again and again.
            out_bias = out_bias.detach()
        return out_sBD, out_bias

    @property
    def gate_reads_own_rows(self) -> bool:
        """Whether the output gate is applied after ``passage.from_stages``. The gate is
        then read from this rank's rows before ``passage.to_stages``. Only mixers of
        :mod:`.mamba_layer` override this property."""
        return False

    @property
    def section_outside_fp8(self) -> str:
        """The name of the gate section in the middle of a row that in_proj never
        computes in FP8; "" if the layout has no such section."""
        return ""

    def project(self, hidden_states: Tensor) -> Tensor:
        """in_proj's output: projection rows ``[s, B, P]`` of ``hidden_states``
        ``[s, B, D]``.

        Under sequence parallelism the input has only this tensor-parallel rank's
        tokens, but the output has the tokens of all tensor-parallel ranks.
        """
        rows, _ = self.in_proj(hidden_states)
        return rows

    def project_rows_and_gates(
        self, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of :meth:`project`, and the gate columns if another product made
        them, else None.

        In FP8 in_proj computes the gates by a separate product
        (:class:`.fp8.GatesOutsideFP8`). Two results then avoid the copy that would join
        rows and gates.
        """
        if not isinstance(self.in_proj, GatesOutsideFP8):
            return self.project(hidden_states), None
        rows, gates = self.in_proj(hidden_states, together=False)
        # In FP8 inference Megatron pads the tokens, and cuts the padding from a
        # linear's first output. The gates are the second output, so their padding is
        # cut here.
        if gates is not None:
            gates = gates[: len(rows)]
        return rows, gates

    # torch.compile would gain nothing: kernels and tables are cached by value
    @uncompiled
    def _mix(
        self,
        rows: Tensor,
        batch: MicroBatch,
        own_rows: Tensor | None,
        gates: Tensor | None,
    ) -> tuple[Tensor, RefilledOutput | None]:
        """Compute out_proj's input from projection rows: front, rule and readout.

        Args:
            rows: ``[S, B, p]`` after ``passage.to_stages``.
            batch: how the micro-batch runs.
            own_rows: this rank's rows ``[s, B, P]`` before ``passage.to_stages``, if
                :attr:`gate_reads_own_rows`.
            gates: the gate columns ``[S, B, .]`` if ``rows`` lacks them.

        Returns:
            out_proj's input ``[s, B, H * V]``, and with ``recompute_norm_out`` an
            object. This object frees the input after the forward, and fills it again
            before out_proj's backward. If ranks exchange rows, it repeats the exchange.
        """
        frees_output = (
            self.recompute_norm_out and self.training and torch.is_grad_enabled()
        )
        if frees_output and saved_tensors_are_hooked():
            log_once(
                f"{type(self).__name__}: recompute_norm_out frees no memory while "
                "saved-tensor hooks are on (a checkpoint with use_reentrant=False, an "
                "offload): the hooks keep every saved tensor."
            )
            frees_output = False
        refilled = None
        if frees_output:
            refilled = RefilledOutput()
        if self.norm_out_checkpoint is not refilled:  # nn.Module's assignment is slow
            self.norm_out_checkpoint = refilled
        stages = self.stages(rows, batch, gates)
        # Chunkwise exchanges inside `mix`: `history` and `states` of `sequence_context`
        # use all-to-all. Forward: `history.fetch` gets the W - 1 rows before each piece,
        # for the front. `states.forward_states` sends each rank the maps for its share
        # of the states, and returns the states for the rule (a state that enters only
        # the next piece is sent itself, without maps). Backward:
        # `states.backward_states` exchanges gradients of states, and `history.give_back`
        # exchanges gradients of rows. In headwise, on one rank, and if no document is
        # cut, `history` and `states` are None. `sequence_context.documents` has the
        # boundaries of the rows that the rule sees.
        sequence_context = batch.passage.sequence_context
        mixed = mix(rows, stages, sequence_context, refilled)
        if batch.scheme.exchanges_heads:
            mixed = batch.passage.from_stages(mixed)
            if refilled is not None:
                # out_proj saves these rows
                refilled.remember_sent(mixed, batch.passage.from_stages)
        readout = stages.readout
        if isinstance(readout, SplitReadout) and readout.second_step_after_exchange:
            mixed = readout.second_step(mixed, own_rows)
        return mixed, refilled

    def stages(
        self, rows: Tensor, batch: MicroBatch, gates: Tensor | None = None
    ) -> Stages:
        """Front, rule and readout of ``batch`` with this rank's parameters.

        ``rows`` are ``[S, B, p]`` after ``passage.to_stages``; ``gates`` are the gate
        columns ``[S, B, .]`` if ``rows`` lacks them, else None. Parameters are the
        convolution's weight and bias, then those that ``fp32`` lists. If ranks exchange
        heads, each parameter is cut to the heads of this rank.
        """
        scheme = batch.scheme
        if self.conv_is_module:
            conv = read_conv_module(self.conv1d, rows, scheme.layout)
        else:
            conv = self.conv1d_weight, self.conv1d_bias
        per_head = self.fp32_parameters()
        if scheme.exchanges_heads:
            weight, bias = conv
            conv = local_conv_parameters(scheme, weight, bias)
            per_head = [
                scheme.local_parameter(parameter, (declared.section,))
                for parameter, declared in zip(per_head, self.fp32, strict=True)
            ]
        return stages_of(
            batch.front,
            batch.rule,
            rows,
            conv + tuple(per_head),
            self._norm_for(scheme),
            recompute=self.recompute_rule and self.training,
            gates=gates,
        )

    def stages_of_whole_sequences(self, rows: Tensor) -> Stages:
        """The stages for rows ``[s, B, P]`` if this rank has whole sequences; for
        generation."""
        batch = self.micro_batches.of_whole_sequences(rows.device, rows.dtype)
        return self.stages(rows, batch)

    def _norm_for(self, scheme: Scheme) -> GatedNorm | SplitReadout | None:
        """The output norm and gate for rows of this scheme, as ``stages_of`` takes it;
        None: a gate without a norm."""
        group = None  # the ranks over which our backward sums the norm's gradients
        if self.tp_size > 1:
            group = self.norm_group
        activation = self.output_gate_activation
        return norm_for_stages(self.out_norm, group, scheme.layout, activation)

    @property
    def config(self) -> TransformerConfig:
        """Megatron's config. The next forward reads ``deterministic_mode``,
        ``batch_invariant_mode`` and ``cp_partition_mode``; ``__init__`` reads the other
        fields.
        """
        return self._config

    @config.setter
    def config(self, config: TransformerConfig) -> None:
        self._config = config
        # Megatron's __init__ sets the config before _build makes micro_batches
        if "micro_batches" in vars(self):
            self.micro_batches.use_config(config)

    @property
    def rule(self) -> Rule:
        """The rule of the last forward; before the first forward, a guess from the
        config."""
        return self.micro_batches.latest_rule

    @property
    def backend(self) -> str:
        return self.rule.name

    def _build(
        self,
        submodules: Any,
        choose_rule: ChooseRule,
        make_front: MakeFront,
        *,
        name: str | None,
        bias: bool,
        conv_bias: bool,
    ) -> None:
        """Make ``micro_batches`` and all parameters, then fill the parameters.

        Optimizers number parameters in the order in which they are made here, so the
        order is part of checkpoint files.

        Args:
            submodules: specs of the projections and the norm, such as
                :class:`MixerSubmodules`.
            choose_rule: see :data:`.micro_batch.ChooseRule`.
            make_front: the result of :func:`..ops.stages.front_maker`.
            name: the module's path in the model, for TE's precision settings.
            bias, conv_bias: whether the projections and the convolution have biases.
        """
        config = self.config
        dims = self.dims
        self.micro_batches = MicroBatchPlanner(
            config,
            dims.layout,
            dims.state_shape,
            dims.conv_kernel_dim,
            self.pg_collection.cp,
            self.loader_layout,
            self.options,
            choose_rule,
            make_front,
            mixer=type(self).__name__,
            recurrence=self.recurrence,
        )
        global_dims = self.global_dims
        if name is None:
            path = ""
        else:
            path = f"{name}."
        layout = layout_of_in_proj(dims)
        common_settings = {"bias": bias, "is_expert": False, "tp_group": self.tp_group}
        in_proj_spec = submodules.in_proj
        if may_use_fp8(config):
            in_proj_spec = with_gates_outside_fp8(
                in_proj_spec, layout, self.section_outside_fp8
            )
        self.in_proj = build_linear(
            in_proj_spec,
            config,
            global_dims.hidden_size,
            layout_of_in_proj(global_dims).width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            # as in Megatron's mixers: TE accepts only four names
            tp_comm_buffer_name="fc1",
            name=f"{path}in_proj" if path else None,
            **common_settings,
        )
        mark_packed(self.in_proj, layout.widths, self.use_muon)
        if may_use_fp8(config):
            set_gate_columns(
                self.in_proj, layout, self.tp_group, self.section_outside_fp8
            )
        add_conv(self, conv_bias)
        add_fp32(self)
        self._build_out_norm(submodules)
        self.out_proj = build_linear(
            submodules.out_proj,
            config,
            global_dims.state_shape.heads * global_dims.state_shape.columns,
            global_dims.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,  # the forward returns the bias; Megatron adds it
            tp_comm_buffer_name="fc2",
            name=f"{path}out_proj" if path else None,
            **common_settings,
        )
        self._add_projections(submodules, path)
        # store the attributes that tell Megatron how parameters are split
        self.remember_marks()
        if self._wants_norm_out_recompute:
            self.recompute_norm_out = keep_unquantised_input(self.out_proj, config)
        self.reset_parameters()

    def _build_out_norm(self, submodules: Any) -> None:
        """Build ``out_norm``, over the V columns of a head, from the spec in
        ``submodules``."""
        config = self.config
        width = self.global_dims.state_shape.columns
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=width,
            eps=config.layernorm_epsilon,
        )
        # Megatron sums the gradients of a parameter with this mark over
        # tensor-parallel ranks, see `norm_group`.
        for parameter in self.out_norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def _add_projections(self, submodules: Any, path: str) -> None:
        """A subclass with more parameters or projections adds them here.

        ``path`` is the module's path in the model with a dot at its end, or "".
        """

    def _init_further_parameters(self) -> None:
        """A subclass with more parameters fills them here, by
        :func:`.tensor_parallel.fill_share`."""

    def _widths_in_fp8(self) -> dict[str, int]:
        """The widths of the matrices that FP8 products read: for each width a name for
        the error, and the number of columns on this rank."""
        return widths_in_fp8(self.dims.layout)

    def _set_size_attributes(self) -> None:
        """A subclass sets its sizes here, under the attribute names of Megatron's
        mixer."""

    @property
    def conv_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The convolution's weight ``[C, 1, W]``, and its bias ``[C]`` or None."""
        if self.conv_is_module:
            return self.conv1d.weight, self.conv1d.bias
        return self.conv1d_weight, self.conv1d_bias

    def reset_parameters(self) -> None:
        """Set all parameters' initial values
        (:func:`.tensor_parallel.reset_parameters`)."""
        reset_parameters(self)

    @property
    def norm_group(self) -> ProcessGroup | None:
        """The group over which our backward sums the norm's gradients; None if Megatron
        sums them.

        Every rank has the whole norm, but computes the norm's gradient from its own
        heads only. If the norm has the mark ``sequence_parallel``, Megatron sums these
        gradients of the ranks; else our backward does.
        """
        if self.tp_size == 1 or self.config.sequence_parallel:
            return None
        return self.tp_group

    # The setters of pg_collection and cp_layout may be called between micro-batches.

    @property
    def pg_collection(self) -> ProcessGroupCollection:
        """The mixer's process groups; if replaced, later micro-batches use the new
        ``cp`` group.

        All ranks of the old and of the new context-parallel group must replace it
        together. The tensor-parallel group cannot change: its ranks hold shares of the
        parameters.
        """
        return self._pg_collection

    @pg_collection.setter
    def pg_collection(self, groups: ProcessGroupCollection) -> None:
        """Use ``groups.cp`` from the next micro-batch on; ``groups.tp`` must have the
        old ranks. This also sets again the sizes that have Megatron's names."""
        require_same_tensor_ranks(self.tp_group, groups)
        self.micro_batches.use_group(groups.cp)
        self._pg_collection = groups
        self._set_size_attributes()

    @property
    def cp_size(self) -> int:
        """The number of context-parallel ranks; setting another number is refused."""
        return self._pg_collection.cp.size()

    @cp_size.setter
    def cp_size(self, size: int) -> None:
        """Accept only the present size, since ``pg_collection`` sets the size."""
        if size != self.cp_size:
            raise ValueError(
                f"cp_size={size} and a context-parallel group of {self.cp_size} ranks: "
                "set pg_collection, which the size follows."
            )

    @property
    def cp_layout(self) -> str | SequenceLayout:
        """How the data loader cuts sequences for context parallelism (the option
        ``cp_layout``). A new value must be set in all layers; the next forward reads
        it."""
        return self.loader_layout.option

    @cp_layout.setter
    def cp_layout(self, option: str | SequenceLayout) -> None:
        self.loader_layout.set_option(option)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return copy_with_same_groups(self, memo)

    # Checkpoints (:mod:`.checkpoint`).

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> StateDict:
        """Megatron's method, with its arguments: the parameters for distributed
        checkpoints, by Megatron's keys."""
        return sharded_state_dict(self, prefix, sharded_offsets, metadata, tp_group)

    def _save_to_state_dict(
        self, destination: StateDict, prefix: str, keep_vars: bool
    ) -> None:
        """Save as torch does; under Megatron-FSDP add the order of in_proj's rows."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        add_row_order(self, destination, prefix)

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, *args: Any, **keywords: Any
    ) -> None:
        """Load as torch does; refuse a file with another order of in_proj's rows."""
        require_row_order(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)

    # Megatron's dynamic inference calls the next three methods by their names
    # (:mod:`.generation`).

    def mamba_state_shapes_per_request(
        self,
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """The shapes of a request's conv window ``[C, W]`` and of its states
        ``[H, K, V]``, see :func:`.generation.state_shapes_per_request`."""
        return state_shapes_per_request(self)

    def ssm_decode(
        self,
        projected: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        batch_indices: Tensor | None = None,
        intermediate_conv_state: Tensor | None = None,
        intermediate_ssm_state: Tensor | None = None,
    ) -> Tensor:
        """Turn rows ``[N, s, P]`` of the next s tokens of N requests into
        ``[N, s, H V]``.

        ``conv_state`` and ``ssm_state`` are the context's buffers, ``batch_indices``
        the requests' slots in them. :func:`.generation.decode_requests` describes all
        arguments.
        """
        return decode_requests(
            self,
            projected,
            conv_state,
            ssm_state,
            batch_indices,
            intermediate_conv_state,
            intermediate_ssm_state,
        )

    def ssm_prefill(
        self, projected: Tensor, conv_state: Tensor, ssm_state: Tensor, context: object
    ) -> Tensor:
        """Turn rows ``[t, 1, P]`` of prompts or chunks of prompts into ``[t, 1, H V]``;
        ``conv_state`` and ``ssm_state`` are buffers of the ``context``, see
        :func:`.generation.prefill_requests`."""
        return prefill_requests(self, projected, conv_state, ssm_state, context)

    def set_for_recompute_input_layernorm(self) -> None:
        """Megatron calls this if the norm before in_proj is recomputed: let in_proj
        save its input unquantised."""
        from megatron.core.extensions.transformer_engine import set_save_original_input

        set_save_original_input(self.in_proj)

    def backward_dw(self) -> None:
        """Megatron calls this under ``delay_wgrad_compute``: compute the delayed weight
        gradients of both projections."""
        self._backward_in_proj()
        self._backward_out_proj()

    # Megatron's mixers have methods with these names. Kimi Delta Attention, which has
    # more projections, overrides them.

    def _backward_in_proj(self) -> None:
        self.in_proj.backward_dw()

    def _backward_out_proj(self) -> None:
        self.out_proj.backward_dw()
