"""How one micro-batch runs: its documents, its scheme, its rule. Decided here and nowhere else.

None of this is certain when a layer is built. Megatron builds models on the CPU
(``--use-cpu-initialization``) or the meta device and moves them later. ``Float16Module`` casts
them, a config may say ``bf16=True`` without a ``params_dtype``, and a micro-batch may bring its own
context-parallel group. So a layer chooses for the expected case when it is built, and again when
rows of another kind arrive. Choices are kept and looked up by the identity of the documents, since
hashing and pricing many lengths takes longer than a launch.

Legend: s this rank's tokens, S tokens of the rows that the mixer runs on, B batch, P projection
width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..compat.observe import log_once
from ..context_parallel import Chunkwise, Headwise, LinearCpMode, Scheme, SequenceLayout, Whole
from ..context_parallel.agreement import number_of_new_layer, require_agreement
from ..context_parallel.machines import check_ranks_per_machine, ranks_per_machine
from ..context_parallel.price import price
from ..context_parallel.scheme import Passage, stay
from ..ops.documents import Documents, require_one_row
from ..ops.host_tables import keep_if_captured, stream_of_tables
from ..ops.layout import Layout
from ..ops.parts import ALONE
from ..ops.rules.base import Rule
from ..ops.state_maps.state_map import StateShape
from ..ops.static_documents import StaticDocuments
from ..ops.trees import TreeDocuments
from .loader_layout import LoaderLayout
from .packing import context_parallel_group_of, resolve_packed_seq_params

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_MOST_GROUPS = 16  # kept at a time
_MOST_MICRO_BATCHES = 32  # likewise; each holds its tables on the device
_WHATEVER = SequenceLayout.ZIGZAG  # one rank holds all tokens in order in every layout


class ChooseRule(Protocol):
    """Chooses a rule for rows of a device and dtype and for the modes; also gives the reason."""

    def __call__(
        self, device: torch.device, dtype: torch.dtype, deterministic: bool, *, aligned: bool
    ) -> tuple[Rule, str]: ...


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch and how it runs.

    Attributes:
        documents: packed into the one batch row; None when not packed.
        tokens: of one batch row, over all context-parallel ranks.
        rule: the recurrence.
        scheme: where the mixer runs.
        passage: how the rows get there and back.
    """

    documents: Documents | None
    tokens: int
    rule: Rule
    scheme: Scheme
    passage: Passage

    @property
    def rows_stay(self) -> bool:
        """Whether the front takes the rows as in_proj wrote them: not exchanged, not on a grid."""
        return not self.scheme.moves_rows and not getattr(self.rule, "aligned", False)

    def local_positions(self) -> Tensor | range:
        """Sequence positions of this rank's share of ``tokens``, in the order it holds them."""
        return self.scheme.local_positions(self.documents, self.tokens)


class _Schemes(NamedTuple):
    """The schemes that can run over one group with one rule."""

    headwise: Headwise | None = None
    chunkwise: Chunkwise | None = None
    whole: Whole | None = None

    def only(self) -> Scheme | None:
        found = [scheme for scheme in self if scheme is not None]
        return found[0] if len(found) == 1 else None


class MicroBatches:
    """Decides how one layer runs each micro-batch.

    Rules are deterministic while ``config.deterministic_mode`` or
    ``torch.use_deterministic_algorithms`` is on. They are aligned
    (:mod:`..ops.aligned`) while ``config.batch_invariant_mode`` is on.

    Args:
        config: rows are expected in its dtype, on a GPU if there is one.
        layout: projection columns of one tensor-parallel rank.
        state: the states of its heads.
        taps: of the convolution.
        group: the context-parallel group of micro-batches that do not bring their own; may be
            replaced, see :meth:`use_group`.
        loader_layout: how micro-batches were cut.
        mode: the scheme, or ``"auto"``: the cheaper of those that can run, see
            :mod:`..context_parallel.price`; None: the config's, else auto.
        choose_rule: makes the rules.
        cp_ranks_per_machine: ranks of ``group`` that NVLink joins; None asks the hosts, see
            :mod:`..context_parallel.machines`.
        mixer, recurrence: their names in the log.

    Raises:
        ValueError: headwise is asked for and the heads cannot be split over ``group``; and what
            ``choose_rule`` raises for the expected rows; a bad ``cp_ranks_per_machine``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layout: Layout,
        state: StateShape,
        taps: int,
        group: Any,
        loader_layout: LoaderLayout,
        *,
        mode: str | LinearCpMode | None,
        choose_rule: ChooseRule,
        cp_ranks_per_machine: int | None = None,
        mixer: str = "GatedDeltaNet",
        recurrence: str = "delta rule",
    ) -> None:
        self._config, self._layout, self._state, self._taps = config, layout, state, taps
        self._loader_layout = loader_layout
        self._mode, self._choose_rule = LinearCpMode.of(mode, config), choose_rule
        self._per_machine = check_ranks_per_machine(cp_ranks_per_machine)
        self._layer, self._mixer, self._recurrence = number_of_new_layer(), mixer, recurrence
        self._whole: dict[tuple, MicroBatch] = {}
        self._schemes: dict[tuple[Any, Rule, SequenceLayout], _Schemes] = {}
        self._made: dict[tuple, MicroBatch] = {}
        self.latest_rule = self.rule_for(_expected_device(), _expected_dtype(config))
        self.use_group(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> MicroBatches:
        """For a copy of the layer: the same groups, and no scheme or micro-batch made for this."""
        other = copy.copy(self)
        other._config = copy.deepcopy(self._config, memo)
        other._loader_layout = copy.deepcopy(self._loader_layout, memo)
        other._layer = number_of_new_layer()
        other._whole, other._schemes, other._made = {}, {}, {}
        return other

    def follow(self, config: TransformerConfig) -> None:
        """Take the modes from this config from now on."""
        self._config = self._loader_layout.config = config

    def use_group(self, group: Any) -> None:
        """Run micro-batches that do not bring their own group over this one from now on.

        Raises:
            ValueError: as the constructor; the group stays what it was.
        """
        alone = group is None or group.size() == 1
        layout = _WHATEVER if alone else self._loader_layout.expected()
        schemes = self._schemes_of(group, self.latest_rule, layout)
        self._group = group
        self._prepare(self.latest_rule, schemes.only())

    def _prepare(self, rule: Rule, scheme: Scheme | None) -> None:
        """Prepare the expected rule for its rows, if every micro-batch has the same scheme."""
        if scheme is not None:
            states = scheme.name == LinearCpMode.CHUNKWISE
            rule.prepare(scheme.layout, _expected_dtype(self._config), states)

    def of(self, packed: PackedSeqParams | None, proj_sBP: Tensor, group: Any = None) -> MicroBatch:
        """How the micro-batch of these projection rows runs.

        Args:
            packed: the documents' boundaries, and maybe a group, which is used before all others.
            proj_sBP: ``[s, B, P]``, this rank's tokens.
            group: used if ``packed`` has none; None: the layer's.

        Raises:
            TypeError, ValueError: boundaries that do not fit, see
                :func:`.packing.resolve_packed_seq_params`.
            ValueError: sources that contradict each other about the cut of the documents, see
                :mod:`.loader_layout`; ranks that disagree (see
                :mod:`..context_parallel.agreement`), a batch of packed rows, ``local_cp_size`` that
                is not the size of ``cp_group``; or the constructor's errors, for a new group,
                device or dtype.
        """
        s, B, _ = proj_sBP.shape
        device, dtype = proj_sBP.device, proj_sBP.dtype
        group, documents = self._group if group is None else group, None
        if packed is not None:
            group = context_parallel_group_of(packed, group)
        tokens = s if group is None else s * group.size()
        if packed is not None:
            documents = resolve_packed_seq_params(packed, tokens, device)
            if documents is not None and B != 1:
                require_one_row(B, f"{B} rows of {s} tokens on this rank")
        layout = _WHATEVER
        if tokens != s:
            layout = self._loader_layout.of(None if documents is None else packed)
            require_agreement(self._layer, group, tokens, B, documents, layout, device)
        key = (stream_of_tables(), documents, group, layout, self._modes(), s, B, device, dtype)
        found = self._made.get(key)
        if found is None:
            rule = self.rule_for(device, dtype)
            scheme = self._choose(group, rule, layout, tokens, B, documents, dtype, device)
            passage = scheme.passage(documents, tokens, B, proj_sBP)
            found = MicroBatch(documents, tokens, rule, scheme, passage)
            if len(self._made) >= _MOST_MICRO_BATCHES:
                del self._made[next(iter(self._made))]
            self._made[key] = found
        self.latest_rule = found.rule
        return keep_if_captured(found)

    def _modes(self) -> tuple[bool, bool]:
        """Whether rules are deterministic, and whether they are aligned."""
        config = self._config
        deterministic = config.deterministic_mode or torch.are_deterministic_algorithms_enabled()
        return deterministic, config.batch_invariant_mode

    def rule_for(self, device: torch.device, dtype: torch.dtype) -> Rule:
        """The rule for rows of this kind in the current modes; errors as the constructor."""
        return self.whole(device, dtype).rule

    def whole(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """How whole sequences on this rank run, as in generation; for any number of tokens."""
        key = device.type, dtype, *self._modes()
        if key not in self._whole:
            deterministic, aligned = key[2:]
            rule, reason = self._choose_rule(device, dtype, deterministic, aligned=aligned)
            log_once(f"{self._mixer}: {self._recurrence} backend {rule.name!r} ({reason})")
            passage = Passage(stay, stay, ALONE)
            self._whole[key] = MicroBatch(None, 0, rule, Whole(self._layout), passage)
        return self._whole[key]

    def _schemes_of(self, group: Any, rule: Rule, layout: SequenceLayout) -> _Schemes:
        found = self._schemes.get((group, rule, layout))
        if found is None:
            if len(self._schemes) >= _MOST_GROUPS:
                self._forget_oldest_group()
            found = self._possible(group, rule, layout)
            self._schemes[group, rule, layout] = found
        return found

    def _forget_oldest_group(self) -> None:
        """Also forget the group's micro-batches, which would keep its schemes alive."""
        others = (key for key in self._schemes if key[0] is not self._group)
        gone = self._schemes.pop(next(others, next(iter(self._schemes))))
        self._made = {k: v for k, v in self._made.items() if v.scheme not in gone}

    def _possible(self, group: Any, rule: Rule, layout: SequenceLayout) -> _Schemes:
        if group is None or group.size() == 1:
            return _Schemes(whole=Whole(self._layout))
        headwise = None
        if self._mode is not LinearCpMode.CHUNKWISE:
            try:
                headwise = self._headwise(group, rule, layout)
            except ValueError as error:
                if self._mode is LinearCpMode.HEADWISE:
                    words = f"{error} Or set linear_cp_mode='chunkwise'."
                    raise type(error)(words) from None
        if self._mode is LinearCpMode.HEADWISE:
            return _Schemes(headwise)
        # One exchange of maps for all documents: the other one adds in another order.
        exchange = "share" if rule.batch_invariant else None
        return _Schemes(
            headwise,
            Chunkwise(
                self._layout, self._state, self._taps, group, layout, exchange,
                cp_ranks_per_machine=self._per_machine,
            ),
        )  # fmt: skip

    def _headwise(self, group: Any, rule: Rule, layout: SequenceLayout) -> Headwise:
        scheme = Headwise(self._layout, group, layout)
        heads = scheme.layout.state_heads
        why = rule.why_not_heads(heads)
        if why is not None:
            raise ValueError(
                f"context_parallel_size={group.size()} leaves {heads} value heads on a rank, and "
                f"{why}. Use fewer ranks or backend='fla'."
            )
        return scheme

    def _choose(
        self,
        group: Any,
        rule: Rule,
        layout: SequenceLayout,
        tokens: int,
        rows: int,
        documents: Documents | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Scheme:
        schemes = self._schemes_of(group, rule, layout)
        aligned = self._config.batch_invariant_mode
        if aligned and isinstance(documents, StaticDocuments):
            raise NotImplementedError(
                "documents in fixed buffers run without batch_invariant_mode: its chunks "
                "lie where the documents of one micro-batch begin. Switch it off, or give "
                "ordinary packed documents outside of graphs."
            )
        if isinstance(documents, TreeDocuments):
            return self._of_trees(schemes)
        only = schemes.only()
        if only is not None:
            self._announce(only, "the only one that these heads and this backend leave")
            return only
        assert schemes.headwise is not None and group is not None
        if isinstance(documents, StaticDocuments):
            self._announce(schemes.headwise, "the one that runs documents in fixed buffers")
            return schemes.headwise
        if aligned:
            self._announce(schemes.headwise, "the one that keeps batch_invariant_mode's bits")
            return schemes.headwise
        lengths = None if documents is None else documents.lengths
        per_machine = ranks_per_machine(group, self._per_machine, device)
        cost = price(
            self._state, schemes.headwise.layout, group.size(), layout,
            tokens, rows, lengths, dtype.itemsize, per_machine,
        )  # fmt: skip
        scheme = getattr(schemes, cost.cheaper)
        self._announce(
            scheme,
            f"the cheaper for {tokens} tokens in {rows if lengths is None else len(lengths)} "
            f"sequences over {group.size()} ranks, {per_machine} per machine: it adds to a forward "
            f"{cost.headwise:.2f} ms headwise, {cost.chunkwise:.2f} ms chunkwise",
        )
        return scheme

    def _of_trees(self, schemes: _Schemes) -> Scheme:
        """The scheme of documents that continue others: all their tokens lie on one rank.

        Raises:
            NotImplementedError: only chunkwise can run, or ``config.batch_invariant_mode`` is on.
        """
        if self._config.batch_invariant_mode:
            raise NotImplementedError(
                "documents that continue others run without config.batch_invariant_mode: its "
                "chunks of 64 tokens begin anew in every document. Switch it off, or pack the "
                "sequences separately."
            )
        scheme = schemes.whole or schemes.headwise
        if scheme is None:
            raise NotImplementedError(
                "documents that continue others run on whole sequences, and these layers can only "
                "run chunkwise here. Use linear_cp_mode='headwise' with heads that the "
                "context-parallel ranks can share, or pack the sequences separately."
            )
        self._announce(scheme, "the one that runs documents that continue others")
        return scheme

    def _announce(self, scheme: Scheme, why: str) -> None:
        """Log the scheme that ``auto`` takes, the first time that it takes it."""
        if self._mode is LinearCpMode.AUTO and scheme.size > 1 and not scheme.announced:
            scheme.announced = True
            log_once(f"{self._mixer}: linear_cp_mode 'auto' takes {scheme.name!r} ({why})")


def _expected_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _expected_dtype(config: TransformerConfig) -> torch.dtype:
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else config.params_dtype
