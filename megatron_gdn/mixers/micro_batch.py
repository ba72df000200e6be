"""The one place that decides how a micro-batch runs: its documents, its scheme and its
rule.

A model may be moved or cast after its layers are built, and a micro-batch may bring its
own context-parallel group. So a new layer chooses a rule for a guessed device and
dtype. Each forward chooses again, for the device and dtype of its rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..compat.observe import log_once
from ..context_parallel import (
    Chunkwise,
    Headwise,
    LinearCpMode,
    Scheme,
    SequenceLayout,
    WholeSequences,
)
from ..context_parallel.agreement import (
    number_of_new_layer,
    ranks_per_machine,
    require_agreement,
)
from ..context_parallel.price import price
from ..context_parallel.scheme import Passage, keep_in_place
from ..ops.documents import Documents, require_one_row
from ..ops.front.table import Front
from ..ops.host_tables import keep_if_captured, stream_of_tables
from ..ops.layout import Layout, SizeError
from ..ops.rules.base import Bits, Rule
from ..ops.stages import WHOLE_SEQUENCES, MakeFront
from ..ops.state_maps.state_map import StateShape
from .loader_layout import LoaderLayout
from .options import MixerOptions
from .packing import context_parallel_group_of, resolve_packed_seq_params

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.distributed import ProcessGroup

_MOST_SCHEMES = 16  # the largest number of entries in MicroBatchPlanner._schemes
_MOST_MICRO_BATCHES = 32  # the largest number of entries in MicroBatchPlanner._batches
_LAYOUT_OF_ONE_RANK = SequenceLayout.ZIGZAG  # on one rank all layouts are equal
# ``choose_rule(device=..., dtype=..., bits=...)`` returns the rule for rows of this
# device and dtype, and a text with the reason for the log.
ChooseRule = Callable[..., tuple[Rule, str]]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The documents of one micro-batch, and how a layer runs them."""

    documents: Documents | None  # None: the batch is not packed
    tokens: int  # tokens of one batch row over all context-parallel ranks
    rule: Rule  # the recurrence
    front: Front  # computes the rule's inputs from projection rows
    scheme: Scheme  # decides which heads and tokens each rank computes
    # exchanges rows: ``to_stages`` before the front, ``from_stages`` after the readout
    passage: Passage

    @property
    def front_reads_in_proj_output(self) -> bool:
        """Whether the front reads the tensors that in_proj returned.

        It reads other tensors if ranks exchange heads, or if ``batch_invariant_mode``
        lays the rows out by chunks (``ops/aligned.py``).
        """
        return not self.scheme.exchanges_heads and self.rule.bits is not Bits.ON_GRID

    def local_positions(self) -> Tensor:
        """Sequence positions of this rank's tokens, in the rank's order."""
        return self.scheme.local_positions(self.documents, self.tokens)


class MicroBatchPlanner:
    """Decides how one layer runs each micro-batch, and stores the decisions.

    Rules are deterministic while ``config.deterministic_mode`` or
    ``torch.use_deterministic_algorithms`` is on. While ``config.batch_invariant_mode``
    is on, a rule counts its chunks from the start of each sequence
    (:class:`..ops.rules.base.Bits`).

    Args:
        layout, state: the layout of projection rows and the shape of the heads' states
            on one tensor-parallel rank.
        taps: W, the taps of the convolution.
        group: the context-parallel group of micro-batches that do not bring their own;
            None: one rank.
        loader_layout: finds how the loader cut sequences.
        choose_rule: see :data:`ChooseRule`.
        make_front: makes the front for rows of one layout, rule, device and dtype
            (:func:`..ops.stages.front_maker`).
        mixer, recurrence: the mixer's class and its recurrence, for the log.

    Raises:
        ValueError: ``options.linear_cp_mode`` is headwise, and the ranks of ``group``
            cannot share the heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layout: Layout,
        state: StateShape,
        taps: int,
        group: ProcessGroup | None,
        loader_layout: LoaderLayout,
        options: MixerOptions,
        choose_rule: ChooseRule,
        make_front: MakeFront,
        *,
        mixer: str = "GatedDeltaNet",
        recurrence: str = "delta rule",
    ) -> None:
        """Store the settings, choose a rule for the guessed device and dtype, and check
        ``group``; the class describes the arguments."""
        self._config = config
        self._layout = layout
        self._state = state
        self._taps = taps
        self._loader_layout = loader_layout
        self._cp_mode = LinearCpMode.of(options.linear_cp_mode, config)
        self._ranks_per_machine = options.cp_ranks_per_machine
        self._choose_rule = choose_rule
        self._make_front = make_front
        # In each context-parallel group one layer of the model compares the ranks'
        # documents. This number tells the layers apart.
        self._layer_number = number_of_new_layer()
        self._mixer_name = mixer
        self._recurrence = recurrence
        # by the key that :meth:`of_whole_sequences` makes
        self._whole_sequence_batches: dict[tuple, MicroBatch] = {}
        # by group, rule and sequence layout
        self._schemes: dict[tuple, tuple[Scheme, ...]] = {}
        # by the key that :meth:`of` makes
        self._batches: dict[tuple, MicroBatch] = {}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        guessed = self.of_whole_sequences(device, _dtype_of_rows(config))
        self.latest_rule = guessed.rule
        self.use_group(group)

    def __deepcopy__(self, memo: dict[int, object]) -> MicroBatchPlanner:
        """A copy for a copied layer: the same groups, but a layer number of its own,
        and no stored schemes and micro-batches."""
        other = copy.copy(self)
        other._config = copy.deepcopy(self._config, memo)
        other._loader_layout = copy.deepcopy(self._loader_layout, memo)
        other._layer_number = number_of_new_layer()
        other._whole_sequence_batches = {}
        other._schemes = {}
        other._batches = {}
        return other

    def use_config(self, config: TransformerConfig) -> None:
        """From now on read ``deterministic_mode`` and the other modes from
        ``config``."""
        self._config = config
        self._loader_layout.config = config

    def use_group(self, group: ProcessGroup | None) -> None:
        """Set the context-parallel group of micro-batches that bring no group.

        Raises a ValueError if no scheme can run the layer over ``group``.
        """
        if group is None or group.size() == 1:
            layout = _LAYOUT_OF_ONE_RANK
        else:
            layout = self._loader_layout.of_packed()
        self._schemes_of(group, self.latest_rule, layout)  # raises
        self.group = group

    def of(
        self,
        packed: PackedSeqParams | None,
        proj_sBP: Tensor,
        group: ProcessGroup | None = None,
        documents: Documents | None = None,
    ) -> MicroBatch:
        """Decide how the micro-batch of the projection rows ``proj_sBP [s, B, P]``
        runs.

        The decision is stored, so a recomputed forward finds it again.

        With several context-parallel ranks, one layer all-gathers five integers in each
        forward, to compare the ranks' micro-batches (:func:`.require_agreement`). When
        the costs of headwise and chunkwise are first compared in a group, the ranks
        exchange their hosts' names.

        Args:
            packed: names the documents, and may name a context-parallel group.
            proj_sBP: this rank's projection rows; device, dtype and sizes are read.
            group: the context-parallel group if ``packed`` names none; None: the
                layer's.
            documents: the documents, if the caller has read them from ``packed``
                before.

        Raises:
            ValueError: boundaries do not fit the rows, or ranks have different
                documents.
        """
        s, B, _ = proj_sBP.shape
        device = proj_sBP.device
        dtype = proj_sBP.dtype
        if group is None:
            group = self.group
        if packed is not None:
            group = context_parallel_group_of(packed, group)
        if group is None:
            tokens = s
        else:
            tokens = s * group.size()
        if documents is not None:  # this only checks the tokens and the device
            documents = Documents.from_cu_seqlens(documents, tokens).to(device)
        elif packed is not None:
            documents = resolve_packed_seq_params(packed, tokens, device)
        if documents is not None and B != 1:
            require_one_row(B, f"{B} rows of {s} tokens on this rank")
        layout = _LAYOUT_OF_ONE_RANK
        if tokens != s:
            layout = self._loader_layout.of(None if documents is None else packed)
            assert group is not None
            # compare the ranks' documents; raise if they differ
            require_agreement(
                self._layer_number, group, tokens, B, documents, layout, device
            )
        # A CUDA stream has tables of its own, so the stream is part of the key.
        # Documents are compared by identity, since hashing their lengths would take
        # longer than a kernel launch. `resolve_packed_seq_params` stores them in
        # ``packed``, so each layer gets the same object.
        key = (
            stream_of_tables(),
            documents,
            group,
            layout,
            self._required_bits(),
            s,
            B,
            device,
            dtype,
        )
        found = self._batches.get(key)
        if found is None:
            rule = self.of_whole_sequences(device, dtype).rule
            scheme = self._choose_scheme(group, rule, layout, documents, proj_sBP)
            passage = scheme.passage(documents, tokens, B, proj_sBP)
            front = self._make_front(scheme.layout, rule, device, dtype, self._taps)
            found = MicroBatch(documents, tokens, rule, front, scheme, passage)
            if len(self._batches) >= _MOST_MICRO_BATCHES:
                del self._batches[next(iter(self._batches))]
            self._batches[key] = found
        self.latest_rule = found.rule
        return keep_if_captured(found)

    def _required_bits(self) -> Bits:
        """What config and torch now demand of the bits of results."""
        config = self._config
        if config.batch_invariant_mode:
            return Bits.ON_GRID
        deterministic = (
            config.deterministic_mode or torch.are_deterministic_algorithms_enabled()
        )
        if deterministic:
            return Bits.DETERMINISTIC
        return Bits.FREE

    def of_whole_sequences(
        self, device: torch.device, dtype: torch.dtype
    ) -> MicroBatch:
        """How rows of this device and dtype run if this rank has whole sequences.

        Generation uses this method. ``documents`` is None and ``tokens`` is 0, since
        the sequences may have any lengths.
        """
        bits = self._required_bits()
        key = device.type, dtype, bits
        if key not in self._whole_sequence_batches:
            rule, reason = self._choose_rule(device=device, dtype=dtype, bits=bits)
            log_once(
                f"{self._mixer_name}: {self._recurrence} backend {rule.name!r} ({reason})"
            )
            passage = Passage(keep_in_place, keep_in_place, WHOLE_SEQUENCES)
            front = self._make_front(self._layout, rule, device, dtype, self._taps)
            scheme = WholeSequences(self._layout)
            batch = MicroBatch(None, 0, rule, front, scheme, passage)
            self._whole_sequence_batches[key] = batch
        return self._whole_sequence_batches[key]

    def _schemes_of(
        self, group: ProcessGroup | None, rule: Rule, layout: SequenceLayout
    ) -> tuple[Scheme, ...]:
        """The schemes that can run over ``group`` for sequences that the loader cut in
        ``layout``: `WholeSequences` on one rank, else `Headwise`, `Chunkwise` or
        both."""
        key = group, rule, layout
        if key not in self._schemes:
            if len(self._schemes) >= _MOST_SCHEMES:
                self._drop_oldest_schemes()
            self._schemes[key] = self._make_schemes(group, rule, layout)
        return self._schemes[key]

    def _drop_oldest_schemes(self) -> None:
        """Drop the oldest schemes and the micro-batches that use them. Schemes of
        groups other than the layer's own are dropped first."""
        oldest = next(iter(self._schemes))
        for key in self._schemes:
            group, _, _ = key
            if group is not self.group:
                oldest = key
                break
        dropped = self._schemes.pop(oldest)
        # Stored micro-batches would keep the dropped schemes in memory.
        self._batches = {
            key: batch
            for key, batch in self._batches.items()
            if batch.scheme not in dropped
        }

    def _make_schemes(
        self, group: ProcessGroup | None, rule: Rule, layout: SequenceLayout
    ) -> tuple[Scheme, ...]:
        """Make the schemes that the heads and the layer's mode allow."""
        if group is None or group.size() == 1:
            return (WholeSequences(self._layout),)
        chunkwise = Chunkwise(self._layout, self._state, self._taps, group, layout)
        if self._cp_mode is LinearCpMode.CHUNKWISE:
            return (chunkwise,)
        why = self._why_not_headwise(group.size(), rule)
        if self._cp_mode is LinearCpMode.HEADWISE:
            if why is not None:
                raise SizeError(f"{why} Or set linear_cp_mode='chunkwise'.")
            return (Headwise(self._layout, group, layout),)
        if why is not None:
            return (chunkwise,)
        return Headwise(self._layout, group, layout), chunkwise

    def _why_not_headwise(self, ranks: int, rule: Rule) -> str | None:
        """Why the scheme headwise cannot run over this number of ranks; None if it can.

        Headwise needs equal shares of the heads, and ``rule`` must run on one share.
        """
        why = self._layout.why_not_share(ranks)
        if why is not None:
            return why
        heads = self._layout.share(ranks).state_heads
        why_not_rule = rule.why_not_heads(heads)
        if why_not_rule is None:
            return None
        return (
            f"context_parallel_size={ranks} leaves {heads} value heads on a rank, and "
            f"{why_not_rule}. Use fewer ranks or backend='fla'."
        )

    def _choose_scheme(
        self,
        group: ProcessGroup | None,
        rule: Rule,
        layout: SequenceLayout,
        documents: Documents | None,
        proj_sBP: Tensor,
    ) -> Scheme:
        """The scheme in which this micro-batch runs.

        If both headwise and chunkwise can run, the first true line decides:

        - the documents or ``batch_invariant_mode`` need headwise: headwise;
        - every document is on one rank, so chunkwise sends nothing: chunkwise;
        - else the cheaper scheme.
        """
        schemes = self._schemes_of(group, rule, layout)
        # WholeSequences on one rank, else headwise if it can run
        first = schemes[0]
        # chunkwise, if both can run
        last = schemes[-1]
        scheme = first
        batch_invariant = self._config.batch_invariant_mode
        why = ""  # the reason for the choice, for the log
        if documents is not None:
            why = documents.why_headwise  # "" if these documents may run chunkwise
            if batch_invariant and documents.why_not_on_grid:
                raise NotImplementedError(documents.why_not_on_grid)
            if documents.may_have_parents and first.name == LinearCpMode.CHUNKWISE:
                raise NotImplementedError(
                    "documents that continue others run on whole sequences, and these "
                    "layers can only run chunkwise here. Use linear_cp_mode='headwise' "
                    "with heads that the context-parallel ranks can share, or pack the "
                    "sequences separately."
                )
        if len(schemes) == 1:
            why = "the only mode for these heads and this backend"
        elif batch_invariant and not why:
            why = "the mode that keeps batch_invariant_mode's bits"
        elif not why and documents is not None and not last.needs_exchange(documents):
            scheme = last
            why = "it sends nothing, since every document lies on one rank"
        elif not why:
            assert group is not None
            tokens = len(proj_sBP) * group.size()
            rows = proj_sBP.shape[1]
            if documents is None:
                lengths = None
                sequences = rows
            else:
                lengths = documents.lengths
                sequences = len(lengths)
            per_machine = ranks_per_machine(
                group, self._ranks_per_machine, proj_sBP.device
            )
            cost = price(
                self._state,
                first.layout,
                group.size(),
                layout,
                tokens,
                rows,
                lengths,
                proj_sBP.dtype.itemsize,
                per_machine,
            )
            scheme = next(each for each in schemes if each.name == cost.cheaper_mode)
            why = (
                f"the cheaper for {tokens} tokens in {sequences} sequences over "
                f"{group.size()} ranks, {per_machine} per machine: exchanges add to a "
                f"forward {cost.headwise:.2f} ms headwise, {cost.chunkwise:.2f} ms "
                "chunkwise"
            )
        if (
            self._cp_mode is LinearCpMode.AUTO
            and scheme.size > 1
            and not scheme.is_logged
        ):
            scheme.is_logged = True
            log_once(
                f"{self._mixer_name}: linear_cp_mode 'auto' takes {scheme.name!r} ({why})"
            )
        return scheme


def _dtype_of_rows(config: TransformerConfig) -> torch.dtype:
    """The dtype that projection rows have in a model with this config."""
    if config.bf16:
        return torch.bfloat16
    if config.fp16:
        return torch.float16
    return config.params_dtype
