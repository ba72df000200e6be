"""The interface of a front: projection rows to the inputs of a rule, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..documents import Documents
from ..layout import Layout
from ..state_maps.state_map import StateShape
from .history import History

# conv weight [C, 1, W], conv bias [C] or None, then the other parameters of the front.
Parameters = Sequence[Any]


class Front(Protocol):
    """Convolution, activation, norms and gates, forward and backward as plain calls.

    ``names``: the rule's inputs in order. ``convolved``: those that the convolution makes, ``[B, S,
    heads, width]``. ``again``: neighbours in ``names`` that the mixer computes again in the
    backward instead of saving them.
    """

    @property
    def layout(self) -> Layout: ...  # the columns of a projection row
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
        history: History | None = None,
    ) -> Any:
        """The rule's inputs, a NamedTuple, from rows ``[S, B, P]`` with any strides of S and B.

        Taps never cross a document's boundaries, the same in every batch row; the ``history``, if
        any, lies before them. With ``only``, neighbours in :attr:`names`, the other inputs are
        None.
        """
        ...

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: Any,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters, in their shapes and dtypes, from the rule's ``grads``.

        Writes every column of ``d_proj`` ``[S, B, P]`` once, except the gate's, which the readout
        writes, and ``history.d_rows``.
        """
        ...


class StepForm(NamedTuple):
    """How one decoded token is computed from its row and the state S of each head.

        q, k, v = SiLU(conv(row)), q and k of unit length if so said
        S       = exp(g) S;    S = S + w k (v - S^T k)^T,  or  S + w k v^T  if nothing is erased,
                                                           or  S + k (w v - S^T (b k))^T
        o       = scale S^T q, and + D v if the front has a fifth parameter D

    ``gates`` gives g ``[N, 1, H]`` or ``[N, 1, H, K]`` and w ``[N, 1, H]`` of rows ``[1, N, P]``,
    A_log and dt_bias. ``kernel_gates``, None without Triton, gives the same as constants for
    :mod:`...generation.step_kernels`.
    """

    sections: tuple[str, str, str]  # of the row: those of q, k and v
    gates: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    kernel_gates: Callable[[], dict[str, Any]] | None
    scale: float = 1.0
    unit_length: bool = False
    erases: bool = True


class GeneratingFront(Front, Protocol):
    """A front whose sequences can continue from a memory."""

    @property
    def state(self) -> StateShape: ...
    @property
    def step(self) -> StepForm: ...


class FrontAround:
    """A front around an inner front."""

    def __init__(self, front: Front) -> None:
        self.layout, self.names = front.layout, front.names
        self.convolved, self.again = front.convolved, front.again
        self._front = front
