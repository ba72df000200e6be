"""The one place that decides how a micro-batch runs: its documents, its scheme and its
rule.

Models are moved and cast after they are built, and a micro-batch may bring its own
context-parallel group. So a new layer takes a rule for a guessed device and dtype; a
forward corrects the rule.
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

_MOST_GROUPS = 16  # the number of groups whose schemes a layer keeps
_MOST_MICRO_BATCHES = 32  # the number of micro-batches whose tables a layer keeps
_ANY_LAYOUT = SequenceLayout.ZIGZAG  # on one rank all layouts are equal
# ``choose(device, dtype, bits)`` returns the rule for rows of this dtype, and the
# reason.
ChooseRule = Callable[..., tuple[Rule, str]]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The documents of one micro-batch, and how a layer runs them."""

    documents: Documents | None  # None: the batch is not packed
    tokens: int  # tokens of one batch row over all context-parallel ranks
    rule: Rule  # the recurrence
    front: Front  # computes the rule's inputs from rows of the scheme's layout
    scheme: Scheme  # decides which heads and tokens each rank computes
    # exchanges rows: ``to_stages`` before the front, ``from_stages`` after the readout
    passage: Passage

    @property
    def rows_stay(self) -> bool:
        """Whether the front reads in_proj's output itself: no exchange moves the rows,
        and no rule counts chunks from each sequence's start (batch_invariant_mode)."""
        return not self.scheme.exchanges_heads and self.rule.bits is not Bits.ON_GRID

    def local_positions(self) -> Tensor:
        """Sequence positions of this rank's tokens, in the rank's order."""
        return self.scheme.local_positions(self.documents, self.tokens)


class MicroBatches:
    """Decides how one layer runs each micro-batch.

    Rules are deterministic while ``config.deterministic_mode`` or
    ``torch.use_deterministic_algorithms`` is on. Rules run on the grid of
    ``ops/aligned.py`` while ``config.batch_invariant_mode`` is on
    (:class:`..ops.rules.base.Bits`).

    ``layout`` and ``state`` are the projection columns and head states of one
    tensor-parallel rank, ``taps`` is W, ``group`` is the context-parallel group of
    micro-batches that do not bring their own, ``loader_layout`` finds how the loader
    cut sequences. ``make_front`` makes the front of a scheme's rows. ``mixer`` and
    ``recurrence`` are names for the log. If ``options.linear_cp_mode`` is headwise,
    ``group``'s ranks must be able to share the heads.
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
        """``loader_layout`` tells the loader's cut; ``recurrence`` names the rule in
        the log."""
        self._config = config
        self._layout = layout
        self._state = state
        self._taps = taps
        self._loader_layout = loader_layout
        self._mode = LinearCpMode.of(options.linear_cp_mode, config)
        self._per_machine = options.cp_ranks_per_machine
        self._choose_rule = choose_rule
        self._make_front = make_front
        self._layer = number_of_new_layer()
        self._mixer = mixer
        self._recurrence = recurrence
        self._whole: dict[tuple, MicroBatch] = {}
        self._schemes: dict[tuple, tuple[Scheme, ...]] = {}
        self._batches: dict[tuple, MicroBatch] = {}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.latest_rule = self.whole(device, _dtype_of_rows(config)).rule
        self.use_group(group)

    def __deepcopy__(self, memo: dict[int, object]) -> MicroBatches:
        """A copy for a copied layer: the same groups, but no stored schemes and
        micro-batches."""
        other = copy.copy(self)
        other._config = copy.deepcopy(self._config, memo)
        other._loader_layout = copy.deepcopy(self._loader_layout, memo)
        other._layer = number_of_new_layer()
        other._whole = {}
        other._schemes = {}
        other._batches = {}
        return other

    def follow(self, config: TransformerConfig) -> None:
        """From now on read ``deterministic_mode`` and the other modes from
        ``config``."""
        self._config = self._loader_layout.config = config

    def use_group(self, group: ProcessGroup | None) -> None:
        """Set the group of micro-batches that bring none; raise if the layer cannot run
        over it."""
        alone = group is None or group.size() == 1
        if alone:
            layout = _ANY_LAYOUT
        else:
            layout = self._loader_layout.of_packed()
        self._schemes_of(group, self.latest_rule, layout)
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

        The context-parallel group is that of ``packed``, else ``group``, else the
        layer's. The documents are those of ``packed``, or ``documents`` if the caller
        has read them before.
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
        if documents is not None:
            documents = Documents.from_cu_seqlens(documents, tokens).to(device)
        elif packed is not None:
            documents = resolve_packed_seq_params(packed, tokens, device)
        if documents is not None and B != 1:
            require_one_row(B, f"{B} rows of {s} tokens on this rank")
        layout = _ANY_LAYOUT
        if tokens != s:
            layout = self._loader_layout.of(None if documents is None else packed)
            assert group is not None
            require_agreement(self._layer, group, tokens, B, documents, layout, device)
        # Documents are compared by identity: to hash lengths takes longer than a kernel
        # launch.
        key = (
            stream_of_tables(),
            documents,
            group,
            layout,
            self._bits(),
            s,
            B,
            device,
            dtype,
        )
        found = self._batches.get(key)
        if found is None:
            rule = self.whole(device, dtype).rule
            scheme = self._choose_scheme(group, rule, layout, documents, proj_sBP)
            passage = scheme.passage(documents, tokens, B, proj_sBP)
            front = self._make_front(scheme.layout, rule, device, dtype, self._taps)
            found = MicroBatch(documents, tokens, rule, front, scheme, passage)
            if len(self._batches) >= _MOST_MICRO_BATCHES:
                del self._batches[next(iter(self._batches))]
            self._batches[key] = found
        self.latest_rule = found.rule
        return keep_if_captured(found)

    def _bits(self) -> Bits:
        """What the config and torch now demand of results' bits: a value of
        :class:`Bits`."""
        config = self._config
        if config.batch_invariant_mode:
            return Bits.ON_GRID
        deterministic = (
            config.deterministic_mode or torch.are_deterministic_algorithms_enabled()
        )
        if deterministic:
            return Bits.DETERMINISTIC
        return Bits.FREE

    def whole(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """The micro-batch for whole sequences of any length on one rank; generation
        uses it."""
        key = device.type, dtype, self._bits()
        if key not in self._whole:
            rule, reason = self._choose_rule(device=device, dtype=dtype, bits=key[2])
            log_once(
                f"{self._mixer}: {self._recurrence} backend {rule.name!r} ({reason})"
            )
            passage = Passage(keep_in_place, keep_in_place, WHOLE_SEQUENCES)
            front = self._make_front(self._layout, rule, device, dtype, self._taps)
            self._whole[key] = MicroBatch(
                None, 0, rule, front, WholeSequences(self._layout), passage
            )
        return self._whole[key]

    def _schemes_of(
        self, group: ProcessGroup | None, rule: Rule, layout: SequenceLayout
    ) -> tuple[Scheme, ...]:
        """The schemes that can run: `WholeSequences` on one rank, else `Headwise`,
        `Chunkwise` or both."""
        key = group, rule, layout
        if key not in self._schemes:
            if len(self._schemes) >= _MOST_GROUPS:
                others = (
                    known for known in self._schemes if known[0] is not self.group
                )
                gone = self._schemes.pop(next(others, next(iter(self._schemes))))
                # Stored micro-batches would keep the removed schemes in memory.
                self._batches = {
                    k: v for k, v in self._batches.items() if v.scheme not in gone
                }
            self._schemes[key] = self._make_schemes(group, rule, layout)
        return self._schemes[key]

    def _make_schemes(
        self, group: ProcessGroup | None, rule: Rule, layout: SequenceLayout
    ) -> tuple[Scheme, ...]:
        """Make the schemes that the heads and the layer's mode allow."""
        if group is None or group.size() == 1:
            return (WholeSequences(self._layout),)
        chunkwise = Chunkwise(self._layout, self._state, self._taps, group, layout)
        if self._mode is LinearCpMode.CHUNKWISE:
            return (chunkwise,)
        why = self._why_not_headwise(group.size(), rule)
        if self._mode is LinearCpMode.HEADWISE:
            if why is not None:
                raise SizeError(f"{why} Or set linear_cp_mode='chunkwise'.")
            return (Headwise(self._layout, group, layout),)
        if why is not None:
            return (chunkwise,)
        return Headwise(self._layout, group, layout), chunkwise

    def _why_not_headwise(self, ranks: int, rule: Rule) -> str | None:
        """Why ranks cannot share the heads, or ``rule`` cannot run on a share; None if
        they can."""
        why = self._layout.why_not_share(ranks)
        if why is not None:
            return why
        heads = self._layout.share(ranks).state_heads
        of_rule = rule.why_not_heads(heads)
        if of_rule is None:
            return None
        return (
            f"context_parallel_size={ranks} leaves {heads} value heads on a rank, and "
            f"{of_rule}. Use fewer ranks or backend='fla'."
        )

    def _choose_scheme(
        self,
        group: ProcessGroup | None,
        rule: Rule,
        layout: SequenceLayout,
        documents: Documents | None,
        x: Tensor,
    ) -> Scheme:
        """The scheme for rows ``x``: the one that settings or documents need, else the
        cheaper."""
        schemes = self._schemes_of(group, rule, layout)
        first = schemes[0]
        last = schemes[-1]  # chunkwise, if both modes can run
        scheme = first
        on_grid = self._config.batch_invariant_mode
        why = ""
        if documents is not None:
            why = documents.why_headwise
            if on_grid and documents.why_not_on_grid:
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
        elif on_grid and not why:
            why = "the mode that keeps batch_invariant_mode's bits"
        elif not why and documents is not None and not last.needs_exchange(documents):
            scheme = last
            why = "it sends nothing, since every document lies on one rank"
        elif not why:
            assert group is not None
            tokens = len(x) * group.size()
            rows = x.shape[1]
            if documents is None:
                lengths = None
            else:
                lengths = documents.lengths
            per_machine = ranks_per_machine(group, self._per_machine, x.device)
            cost = price(
                self._state,
                first.layout,
                group.size(),
                layout,
                tokens,
                rows,
                lengths,
                x.dtype.itemsize,
                per_machine,
            )
            scheme = next(each for each in schemes if each.name == cost.cheaper)
            why = (
                f"the cheaper for {tokens} tokens in "
                f"{rows if lengths is None else len(lengths)} sequences over "
                f"{group.size()} ranks, {per_machine} per machine: exchanges add to a "
                f"forward {cost.headwise:.2f} ms headwise, {cost.chunkwise:.2f} ms "
                "chunkwise"
            )
        if self._mode is LinearCpMode.AUTO and scheme.size > 1 and not scheme.is_logged:
            scheme.is_logged = True
            log_once(
                f"{self._mixer}: linear_cp_mode 'auto' takes {scheme.name!r} ({why})"
            )
        return scheme


def _dtype_of_rows(config: TransformerConfig) -> torch.dtype:
    """The dtype that projection rows have in a model with this config."""
    if config.bf16:
        return torch.bfloat16
    if config.fp16:
        return torch.float16
    return config.params_dtype
