"""Chooses the scheme that a micro-batch runs under."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..dims import GDNDims
from ..observe import log_once
from ..ops import Documents
from ..ops.delta_rule.base import Core, can_pass_states
from ..ops.delta_rule.obstacles import why_not_heads
from ..packing import resolve_packed_seq_params
from .chunkwise.scheme import Chunkwise
from .headwise.scheme import Headwise, SingleRank
from .layouts import SequenceLayout
from .price import LinearCpMode, price

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_MOST_GROUPS = 16  # kept at a time; each holds the tables of some micro-batches

Scheme = SingleRank | Headwise | Chunkwise


class ContextParallel:
    """The schemes of one layer, for every context-parallel group it meets.

    Args:
        dims: sizes on one tensor-parallel rank.
        group: the group of micro-batches that do not bring their own.
        layout: how the ranks' tokens were cut from the sequence.
        mode: the scheme, or ``"auto"``: the cheaper of those that can run, see :mod:`.price`.
        core: the layer's delta rule.
        element_size: bytes of an activation.

    Raises:
        ValueError: headwise is asked for and the heads cannot be split over ``group``.
        NotImplementedError: chunkwise is asked for, or all that the heads leave, and ``core``
            cannot pass states.
    """

    def __init__(
        self,
        dims: GDNDims,
        group: Any,
        layout: SequenceLayout,
        *,
        mode: LinearCpMode,
        core: Core,
        element_size: int,
    ) -> None:
        self._dims, self._group, self._layout = dims, group, layout
        self._mode, self._core, self._element_size = mode, core, element_size
        self._schemes: dict[Any, dict[LinearCpMode, Scheme]] = {}
        self._announced: set[Scheme] = set()
        self._over(group)

    def _over(self, group: Any) -> dict[LinearCpMode, Scheme]:
        """The schemes that can run over a group."""
        if group not in self._schemes:
            if len(self._schemes) >= _MOST_GROUPS:
                oldest = next(g for g in self._schemes if g is not self._group)
                del self._schemes[oldest]
            self._schemes[group] = self._make(group)
        return self._schemes[group]

    def _make(self, group: Any) -> dict[LinearCpMode, Scheme]:
        if group is None or group.size() == 1:
            return {self._mode: SingleRank(self._dims)}
        made: dict[LinearCpMode, Scheme] = {}
        refusal = None
        if self._mode is not LinearCpMode.CHUNKWISE:
            try:
                made[LinearCpMode.HEADWISE] = self._headwise(group)
            except ValueError as error:
                if self._mode is LinearCpMode.HEADWISE:
                    raise ValueError(f"{error} Or set linear_cp_mode='chunkwise'.") from None
                refusal = error
        if self._mode is not LinearCpMode.HEADWISE and can_pass_states(self._core):
            # One way for maps to travel, whatever is packed: another adds in another order.
            exchange = "share" if self._core.batch_invariant else None
            made[LinearCpMode.CHUNKWISE] = Chunkwise(
                self._dims, group, self._layout, exchange=exchange
            )
        if not made:
            why = "" if refusal is None else f" Headwise cannot run either: {refusal}"
            raise NotImplementedError(
                f"linear_cp_mode={self._mode.value!r} needs a delta rule that takes and gives "
                f"states, which backend={self._core.name!r} does not; 'flash_qla', 'fla' and "
                f"'reference' do.{why}"
            )
        return made

    def _headwise(self, group: Any) -> Headwise:
        scheme = Headwise(self._dims, group, self._layout)
        why = why_not_heads(self._core.name, scheme.dims.num_value_heads)
        if why is not None:
            raise ValueError(
                f"context_parallel_size={group.size()} leaves {scheme.dims.num_value_heads} value "
                f"heads on a rank, and {why}. Use fewer ranks or backend='fla'."
            )
        return scheme

    def _group_of(self, packed: PackedSeqParams | None) -> Any:
        if packed is None or (packed.cp_group is None and packed.local_cp_size is None):
            return self._group
        group, size = packed.cp_group, packed.local_cp_size
        if size is not None and size != (1 if group is None else group.size()):
            given = "no cp_group" if group is None else f"a cp_group of {group.size()} ranks"
            raise ValueError(
                f"packed_seq_params has local_cp_size={size} and {given}; they must agree (a size "
                f"of 1 needs no group)."
            )
        return group

    def resolve(
        self, packed: PackedSeqParams | None, hidden_states: Tensor, sp_size: int
    ) -> tuple[Scheme, Documents | None, int]:
        """What one micro-batch is: how it runs, its documents, its tokens over all ranks.

        Args:
            packed: the documents' boundaries, and maybe a group that goes before the layer's.
            hidden_states: ``[s, B, D]``.
            sp_size: ranks that share a context-parallel rank's tokens by sequence parallelism.

        Raises:
            ValueError: boundaries that do not fit, a batch of packed rows, ``local_cp_size`` that
                is not the size of ``cp_group``; or as the constructor, for a group seen first here.
            NotImplementedError: as the constructor.
        """
        group = self._group_of(packed)
        rows = hidden_states.shape[1]
        tokens = hidden_states.shape[0] * sp_size * (1 if group is None else group.size())
        documents = resolve_packed_seq_params(packed, tokens, hidden_states.device)
        if documents is not None and rows != 1:
            raise ValueError(
                f"packed documents need a batch of 1, got hidden_states of shape "
                f"{tuple(hidden_states.shape)}. Lay the rows end to end and extend cu_seqlens."
            )
        return self._choose(group, tokens, rows, documents), documents, tokens

    def _choose(self, group: Any, tokens: int, rows: int, documents: Documents | None) -> Scheme:
        schemes = self._over(group)
        if len(schemes) == 1:
            (scheme,) = schemes.values()
            self._announce(scheme, "the only one that these heads and this backend leave")
            return scheme
        lengths = None if documents is None else documents.lengths
        cost = price(
            self._dims, schemes[LinearCpMode.HEADWISE].dims, group.size(), self._layout,
            tokens, rows, lengths, self._element_size,
        )  # fmt: skip
        scheme = schemes[cost.cheaper]
        self._announce(
            scheme,
            f"the cheaper for {tokens} tokens in {rows if lengths is None else len(lengths)} "
            f"sequences: bytes received per rank and forward, {cost.headwise / 2**20:.1f} MiB "
            f"headwise, {cost.chunkwise / 2**20:.1f} MiB chunkwise with its extra work",
        )
        return scheme

    def _announce(self, scheme: Scheme, why: str) -> None:
        """Log what ``auto`` took, the first time that it takes it."""
        if self._mode is LinearCpMode.AUTO and scheme.size > 1 and scheme not in self._announced:
            self._announced.add(scheme)
            log_once(f"GatedDeltaNet: linear_cp_mode 'auto' takes {scheme.name!r} ({why})")
