"""The interface of a front: projection rows to the inputs of a rule, and back.

Legend: S seq, B batch, P projection width, C convolved columns, W conv taps; in slots: N sequences,
M slots, H heads with a state, K rows of a state, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..documents import Documents
from ..layout import Layout
from ..rules.base import Rule
from ..state_maps.state_map import StateShape

# conv weight [C, 1, W], conv bias [C] or None, then the other parameters of the front.
Parameters = Sequence[Any]


class Front(Protocol):
    """Convolution, activation, norms and gates, forward and backward as plain calls.

    Attributes:
        layout: the columns of a projection row.
        names: of the rule's inputs that :meth:`forward` makes, in order.
        convolved: those that the convolution makes, ``[B, S, heads, width]`` each. Their first
            W - 1 tokens of a sequence depend on its history.
        again: those that the mixer computes again in the backward instead of saving them,
            neighbours in :attr:`names`.
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def convolved(self) -> tuple[str, ...]: ...
    @property
    def again(self) -> tuple[str, ...]: ...

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> Any:
        """The rule's inputs, a NamedTuple.

        Args:
            proj: ``[S, B, P]``, any strides of S and B.
            parameters: the front's own.
            documents: boundaries of packed documents, the same in every batch row; None when every
                row is one sequence. Taps never cross a boundary.
            only: names to compute, neighbours in :attr:`names`; the others are None.
        """
        ...

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: Any,
        d_proj: Tensor,
        documents: Documents | None,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters, in their shapes and dtypes.

        Args:
            grads: of the inputs, as the rule returns them.
            d_proj: ``[S, B, P]``. Every column is written once, except the gate's, which the output
                norm writes.
        """
        ...


class GeneratingFront(Front, Protocol):
    """A front whose sequences can continue from a carry.

    Attributes:
        state: the states of the heads.
        step_rule: the recurrence of a decode step.
    """

    @property
    def state(self) -> StateShape: ...
    @property
    def step_rule(self) -> Rule: ...

    def for_step(self, dtype: torch.dtype) -> Front:
        """The front of a decode step of rows in ``dtype``.

        The rule's inputs of one token are small, so they have the dtype of the state.
        """
        ...


class FrontAround:
    """A front around an inner front; a subclass defines :meth:`Front.forward`."""

    def __init__(self, front: Front) -> None:
        self.layout, self.names = front.layout, front.names
        self.convolved, self.again = front.convolved, front.again
        self._front = front

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: Any,
        d_proj: Tensor,
        documents: Documents | None,
    ) -> tuple[Tensor | None, ...]:
        """As the inner front's."""
        return self._front.backward(proj, parameters, grads, d_proj, documents)
