"""What a mixer is made of between its projections; training and generation run the same parts."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, cast

from torch import Tensor

from .aligned import rows_before
from .front.base import Front, GeneratingFront
from .generation.carry import CarryShape
from .readout.base import Apart, Readout
from .rules.base import Rule
from .state_maps.state_map import StateShape


class GatedNorm(NamedTuple):
    """The output norm: ``RMSNorm(o) * gamma * act(z)``, or ``* (1 + gamma)`` zero-centered."""

    gamma: Tensor  # [V]
    eps: float = 1e-6
    zero_centered: bool = False
    activation: str = "silu"  # or "sigmoid"


class Parts(NamedTuple):
    """The parts of a mixer, for rows of one device, dtype and scheme.

    Attributes:
        front: projection rows to the rule's inputs.
        rule: the recurrence.
        readout: the rule's output to rows for out_proj.
        parameters: the front's, then the readout's gamma or None; local to the scheme.
        run_again: training keeps nothing of the front and the rule, and runs both again in the
            backward (:mod:`.second_run`).
    """

    front: Front
    rule: Rule
    readout: Readout | Apart
    parameters: tuple[Tensor | None, ...]
    run_again: bool = False

    @property
    def aligned(self) -> bool:
        """Whether a token's bits depend on its sequence's tokens alone, see :mod:`.aligned`."""
        return getattr(self.rule, "aligned", False)

    @property
    def of_front(self) -> tuple[Tensor | None, ...]:
        """The front's parameters."""
        return self.parameters[:-1]

    def read_out(self, o: Tensor, rows: Tensor) -> Tensor:
        """``o [B, s, H, V]`` to ``[s, B, H * V]``. All heads must be on this rank."""
        return self.readout.forward(o, rows, self.parameters[-1])

    # For generation only.

    @property
    def steps(self) -> GeneratingFront:
        return cast(GeneratingFront, self.front)

    @property
    def state(self) -> StateShape:
        """The states of the heads."""
        return self.steps.state

    @property
    def past(self) -> int:
        """Rows before a token that the convolution reads."""
        return rows_before(self.parameters)

    @property
    def shape(self) -> CarryShape:
        """Sizes of the carry that a sequence passes from one call to the next."""
        weight = self.parameters[0]
        assert weight is not None
        return _shape(cast(GeneratingFront, self.front), weight.shape[-1], self.aligned)


@lru_cache(maxsize=64)
def _shape(front: GeneratingFront, taps: int, aligned: bool) -> CarryShape:
    return CarryShape.of(front.layout, front.state, taps, aligned)
