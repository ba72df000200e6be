"""How one micro-batch runs: its documents, its scheme, its rule. Decided here and nowhere else.

Models are moved and cast after they are built, and a micro-batch may bring its own context-parallel
group. So a layer guesses device and dtype when it is built, and chooses again for other rows.
Answers are kept by the identity of the documents: to hash many lengths takes longer than a launch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compat.observe import log_once
from ..context_parallel import Chunkwise, Headwise, LinearCpMode, Scheme, SequenceLayout, Whole
from ..context_parallel.agreement import (
    check_ranks_per_machine,
    number_of_new_layer,
    ranks_per_machine,
    require_agreement,
)
from ..context_parallel.price import price
from ..context_parallel.scheme import Passage, stay
from ..ops.documents import Documents, require_one_row
from ..ops.host_tables import keep_if_captured, stream_of_tables
from ..ops.layout import Layout
from ..ops.parts import ALONE
from ..ops.rules.base import Bits, Rule
from ..ops.state_maps.state_map import StateShape
from .loader_layout import LoaderLayout
from .packing import context_parallel_group_of, resolve_packed_seq_params

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

_MOST_GROUPS = 16  # whose schemes a layer keeps
_MOST_MICRO_BATCHES = 32  # that a layer keeps, each with its tables on the device
_WHATEVER = SequenceLayout.ZIGZAG  # any: one rank holds all tokens in order in every layout
# ``choose(device, dtype, bits)`` gives the rule for such rows and the reason.
ChooseRule = Callable[..., tuple[Rule, str]]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    documents: Documents | None  # packed into the one batch row
    tokens: int  # of one batch row, over all context-parallel ranks
    rule: Rule  # the recurrence
    scheme: Scheme  # where the mixer runs
    passage: Passage  # how the rows get there and back

    @property
    def rows_stay(self) -> bool:
        """Whether the front takes in_proj's rows themselves: not exchanged, not put on a grid."""
        return not self.scheme.moves_rows and self.rule.bits is not Bits.ON_GRID

    def local_positions(self) -> Tensor | range:
        """Sequence positions of this rank's share of ``tokens``, in its order."""
        return self.scheme.local_positions(self.documents, self.tokens)


class MicroBatches:
    """Decides how one layer runs each micro-batch.

    Rules are deterministic while ``config.deterministic_mode`` or
    ``torch.use_deterministic_algorithms`` is on, and on the grid while
    ``config.batch_invariant_mode`` is (:class:`..ops.rules.base.Bits`).

    Args:
        config: rows are expected in its dtype, on a GPU if there is one.
        layout, state: of one tensor-parallel rank: projection columns, the states of its heads.
        taps: of the convolution.
        group: the context-parallel group of micro-batches that do not bring their own.
        loader_layout: how micro-batches were cut.
        mode: the scheme, or ``"auto"`` for the cheaper one; None takes the config's, else auto.
        choose_rule: makes the rules.
        cp_ranks_per_machine: ranks of ``group`` that NVLink joins; None asks the hosts.
        mixer, recurrence: their names in the log.

    Raises:
        ValueError: headwise is asked for and the heads cannot be split over ``group``.
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
        self._schemes: dict[tuple[Any, Rule, SequenceLayout], tuple[Scheme, ...]] = {}
        self._made: dict[tuple, MicroBatch] = {}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.latest_rule = self.whole(device, _dtype_of_rows(config)).rule
        self.use_group(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> MicroBatches:
        """For a copy of the layer: the same groups, without schemes and micro-batches."""
        other = copy.copy(self)
        other._config = copy.deepcopy(self._config, memo)
        other._loader_layout = copy.deepcopy(self._loader_layout, memo)
        other._layer = number_of_new_layer()
        other._whole, other._schemes, other._made = {}, {}, {}
        return other

    def follow(self, config: TransformerConfig) -> None:
        """Take the modes of this config from now on."""
        self._config = self._loader_layout.config = config

    def use_group(self, group: Any) -> None:
        """Run micro-batches that bring no group over this one, unless the constructor would refuse
        it.
        """
        alone = group is None or group.size() == 1
        layout = _WHATEVER if alone else self._loader_layout.of_packed()
        rule = self.latest_rule
        first, *others = self._schemes_of(group, rule, layout)
        self._group = group
        if not others:  # the kernels of the only scheme are compiled now
            states = first.name == LinearCpMode.CHUNKWISE
            rule.prepare(first.layout, _dtype_of_rows(self._config), states)

    def of(self, packed: PackedSeqParams | None, proj_sBP: Tensor, group: Any = None) -> MicroBatch:
        """How the micro-batch of these projection rows ``[s, B, P]`` runs.

        The group is that of ``packed``, else ``group``, else the layer's. Errors are those of
        :func:`.packing.resolve_packed_seq_params`, :mod:`.loader_layout`,
        :mod:`..context_parallel.agreement` and the constructor.
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
        key = (stream_of_tables(), documents, group, layout, self._bits(), s, B, device, dtype)
        found = self._made.get(key)
        if found is None:
            rule = self.whole(device, dtype).rule
            scheme = self._choose(group, rule, layout, documents, proj_sBP)
            passage = scheme.passage(documents, tokens, B, proj_sBP)
            found = MicroBatch(documents, tokens, rule, scheme, passage)
            if len(self._made) >= _MOST_MICRO_BATCHES:
                del self._made[next(iter(self._made))]
            self._made[key] = found
        self.latest_rule = found.rule
        return keep_if_captured(found)

    def _bits(self) -> Bits:
        config = self._config
        if config.batch_invariant_mode:
            return Bits.ON_GRID
        deterministic = config.deterministic_mode or torch.are_deterministic_algorithms_enabled()
        return Bits.DETERMINISTIC if deterministic else Bits.FREE

    def whole(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """How whole sequences of any length run on this rank, as in generation."""
        key = device.type, dtype, self._bits()
        if key not in self._whole:
            rule, reason = self._choose_rule(device, dtype, key[2])
            log_once(f"{self._mixer}: {self._recurrence} backend {rule.name!r} ({reason})")
            passage = Passage(stay, stay, ALONE)
            self._whole[key] = MicroBatch(None, 0, rule, Whole(self._layout), passage)
        return self._whole[key]

    def _schemes_of(self, group: Any, rule: Rule, layout: SequenceLayout) -> tuple[Scheme, ...]:
        """The schemes that can run: whole; headwise, chunkwise, or both in this order."""
        found = self._schemes.get((group, rule, layout))
        if found is None:
            if len(self._schemes) >= _MOST_GROUPS:
                others = (key for key in self._schemes if key[0] is not self._group)
                gone = self._schemes.pop(next(others, next(iter(self._schemes))))
                # Kept micro-batches would keep the group's schemes alive.
                self._made = {k: v for k, v in self._made.items() if v.scheme not in gone}
            found = self._possible(group, rule, layout)
            self._schemes[group, rule, layout] = found
        return found

    def _possible(self, group: Any, rule: Rule, layout: SequenceLayout) -> tuple[Scheme, ...]:
        if group is None or group.size() == 1:
            return (Whole(self._layout),)
        found: list[Scheme] = []
        if self._mode is not LinearCpMode.CHUNKWISE:
            try:
                headwise = Headwise(self._layout, group, layout)
                heads = headwise.layout.state_heads
                if (why := rule.why_not_heads(heads)) is not None:
                    raise ValueError(
                        f"context_parallel_size={group.size()} leaves {heads} value heads on a "
                        f"rank, and {why}. Use fewer ranks or backend='fla'."
                    )
                found.append(headwise)
            except ValueError as error:
                if self._mode is LinearCpMode.HEADWISE:
                    words = f"{error} Or set linear_cp_mode='chunkwise'."
                    raise type(error)(words) from None
        if self._mode is LinearCpMode.HEADWISE:
            return tuple(found)
        # The same exchange of maps for all documents: the other one adds in another order.
        exchange = "share" if rule.batch_invariant else None
        chunkwise = Chunkwise(
            self._layout, self._state, self._taps, group, layout, exchange,
            cp_ranks_per_machine=self._per_machine,
        )  # fmt: skip
        return *found, chunkwise

    def _choose(
        self, group: Any, rule: Rule, layout: SequenceLayout, documents: Documents | None, x: Tensor
    ) -> Scheme:
        first, *others = self._schemes_of(group, rule, layout)
        scheme, on_grid, why = first, self._config.batch_invariant_mode, ""
        if documents is not None:
            why = documents.why_headwise
            if on_grid and documents.why_not_on_grid:
                raise NotImplementedError(documents.why_not_on_grid)
        if documents is not None and documents.continue_others:  # all must lie on one rank
            if first.name == LinearCpMode.CHUNKWISE:
                raise NotImplementedError(
                    "documents that continue others run on whole sequences, and these layers can "
                    "only run chunkwise here. Use linear_cp_mode='headwise' with heads that the "
                    "context-parallel ranks can share, or pack the sequences separately."
                )
        elif not others:
            why = "the only one that these heads and this backend leave"
        elif on_grid and not why:
            why = "the one that keeps batch_invariant_mode's bits"
        elif not why:
            tokens, rows = len(x) * group.size(), x.shape[1]
            lengths = None if documents is None else documents.lengths
            per_machine = ranks_per_machine(group, self._per_machine, x.device)
            cost = price(
                self._state, first.layout, group.size(), layout,
                tokens, rows, lengths, x.dtype.itemsize, per_machine,
            )  # fmt: skip
            scheme = next(each for each in (first, *others) if each.name == cost.cheaper)
            why = (
                f"the cheaper for {tokens} tokens in {rows if lengths is None else len(lengths)} "
                f"sequences over {group.size()} ranks, {per_machine} per machine: it adds to a "
                f"forward {cost.headwise:.2f} ms headwise, {cost.chunkwise:.2f} ms chunkwise"
            )
        if self._mode is LinearCpMode.AUTO and scheme.size > 1 and not scheme.announced:
            scheme.announced = True
            log_once(f"{self._mixer}: linear_cp_mode 'auto' takes {scheme.name!r} ({why})")
        return scheme


def _dtype_of_rows(config: TransformerConfig) -> torch.dtype:
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else config.params_dtype
