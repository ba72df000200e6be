"""Where the history and the state of a batch's sequences come from.

| the rows of the batch are         | history (conv)           | state                            |
|-----------------------------------|--------------------------|----------------------------------|
| whole sequences                   | zeros                    | zero                             |
| pieces of sequences on many ranks | rows of the piece before | folded maps of the pieces before |
| sequences continued from a cache  | the cache                | the cache                        |

Legend: N sequences, H heads with a state, K rows of a state, V columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .documents import Documents
from .front.history import HistoryLink
from .rules.base import Rule, RuleBackward, RuleForward


class StateLink(Protocol):
    """States that enter the N sequences of a batch, and gradients of those that leave.

    Attributes:
        documents: boundaries of the sequences, all batch rows end to end.
    """

    documents: Documents

    def entering(
        self, rule: Rule, forward: RuleForward, inputs: Any
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """``[N, H, K, V]`` for ``forward.run``, and tensors to keep for :meth:`leaving`."""
        ...

    def entered(self, kept: tuple[Tensor, ...]) -> Tensor | None:
        """The states that :meth:`entering` gave, from what it kept."""
        ...

    def leaving(
        self, backward: RuleBackward, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """``initial`` as in the forward, and ``d_final``, for ``backward.run``."""
        ...


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Boundaries, history and states that belong to the rows of one batch.

    Attributes:
        documents: boundaries inside a batch row, the same in every row: documents, or pieces of
            them. None when a row is one sequence.
        history, states: None if they are zero.
    """

    documents: Documents | None = None
    history: HistoryLink | None = None
    states: StateLink | None = None

    @property
    def of_rule(self) -> Documents | None:
        """Boundaries as the rule takes them."""
        return self.documents if self.states is None else self.states.documents


ALONE = Neighbours()  # every batch row is one whole sequence
