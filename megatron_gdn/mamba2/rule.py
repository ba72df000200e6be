"""The rules of a Mamba2 mixer, and the choice among them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.documents import Documents
from ..ops.obstacles import FLA_IS_TIMED, Obstacle, why_not_fla
from ..ops.rules.choice import Choice, Kernels, choose
from ..ops.rules.token_rule import TokenRule, recurrence
from ..ops.state_maps.state_map import StateShape
from .fla import FlaSSD, why_not_callable
from .plain import PlainSSD, SSDInputs


def _why_not_fla(device: torch.device, dtype: torch.dtype, state: StateShape) -> Obstacle | None:
    obstacle = why_not_fla(device, dtype, functions=why_not_callable)
    if obstacle is not None:
        return obstacle
    if state.rows > 256:
        return Obstacle(f"fla takes a state dim up to 256, not {state.rows}")
    for name, size in (("state", state.rows), ("head", state.columns)):
        if size % 2:
            return Obstacle(f"fla's backward takes an even {name} dim, not {size}")
    return None


def choose_ssd(
    backend: str,
    state: StateShape,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    *,
    aligned: bool = False,
) -> Choice:
    """The rule of a Mamba2 mixer, from dtype, device and installed packages alone.

    ``backend``: ``"fla"`` (its ``simple_gla`` kernels), ``"reference"`` or ``"auto"``, fla where it
    runs; see :func:`..ops.rules.choice.choose`, which has the errors too.
    """
    fla = Kernels(lambda: _why_not_fla(device, dtype, state), FlaSSD, "fla runs here", FLA_IS_TIMED)
    return choose(
        backend, "Mamba2", {"fla": fla}, PlainSSD,
        device=device, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip


class RecurrentSSD(TokenRule):
    def tokens(
        self, inputs: SSDInputs, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """In fp32 (fp64 for fp64); refuses packed documents."""
        if documents is not None:
            raise NotImplementedError(
                "the token recurrence of Mamba2 takes rows of one length, not packed documents."
            )
        wide = torch.promote_types(inputs.x.dtype, torch.float32)
        x, B, C, dt, g, D = (t.to(wide) for t in inputs)
        o, final = recurrence(C, B, dt[..., None] * x, g, None, initial)
        return (o + D * x).to(inputs.x.dtype), final
