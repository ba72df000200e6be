"""Implementations of the SSD recurrence for the mixer, and the choice among them.

The SSD recurrence one token after the other, for decode steps.

Legend: B batch, S seq, G groups, R heads per group, H = G R, K state dim, V head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.documents import Documents
from ..ops.obstacles import FLA_IS_TIMED, Obstacle, why_not_fla
from ..ops.rules.base import Rule
from ..ops.rules.choice import Choice, Kernels, kernels_or_plain
from ..ops.rules.token_rule import TokenRule
from ..ops.state_maps.state_map import StateShape
from .plain import PlainSSD, SSDInputs, wide_dtype


def _why_not_fla(
    device: torch.device, dtype: torch.dtype, state_dim: int, head_dim: int | None
) -> Obstacle | None:
    obstacle = why_not_fla(device, dtype)
    if obstacle is not None:
        return obstacle
    if state_dim > 256:
        return Obstacle(f"fla takes a state dim up to 256, not {state_dim}")
    for name, size in (("state", state_dim), ("head", head_dim)):
        if size is not None and size % 2:
            return Obstacle(f"fla's backward takes an even {name} dim, not {size}")
    from .fla import why_not_callable

    why = why_not_callable()
    return None if why is None else Obstacle(f"flash-linear-attention: {why}", ImportError)


def resolve_ssd(
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    state_dim: int,
    head_dim: int | None = None,
    deterministic: bool = False,
    aligned: bool = False,
) -> Choice:
    """Choose the rule of a Mamba2 mixer, from dtype, device and installed packages alone.

    Args:
        backend: ``"fla"`` (its ``simple_gla`` kernels), ``"reference"`` (plain torch) or
            ``"auto"``, fla where it runs.
        state_dim, head_dim: rows and columns of a state.
        deterministic, aligned: see :func:`megatron_gdn.ops.rules.choice.kernels_or_plain`, which
            has the errors too.
    """
    device = torch.device(device)

    def fla() -> Rule:
        from .fla import FlaSSD

        return FlaSSD()

    def why_not() -> Obstacle | None:
        return _why_not_fla(device, dtype, state_dim, head_dim)

    return kernels_or_plain(
        backend, "Mamba2", PlainSSD, {"fla": Kernels(why_not, fla, FLA_IS_TIMED)},
        device=device, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip


def choose_ssd(
    backend: str,
    state: StateShape,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    *,
    aligned: bool = False,
) -> Choice:
    """:func:`resolve_ssd` for a mixer, which learns device and dtype last."""
    return resolve_ssd(
        backend, device=device, dtype=dtype, state_dim=state.rows, head_dim=state.columns,
        deterministic=deterministic, aligned=aligned,
    )  # fmt: skip


class RecurrentSSD(TokenRule):
    """The definition itself, in plain torch: elementwise products and sums over a state's rows."""

    def tokens(
        self, inputs: SSDInputs, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows of a batch only, in fp32 (fp64 for fp64).

        Raises:
            NotImplementedError: packed documents.
        """
        if documents is not None:
            raise NotImplementedError(
                "the token recurrence of Mamba2 takes rows of one length, not packed documents."
            )
        x, B, C, dt, g, D = inputs
        wide, grouped = wide_dtype(x), (B.shape[2], -1)
        x_BSGRV, dt_BSGR, g_BSGR, D_BSGRV = (
            t.to(wide).unflatten(2, grouped) for t in (x, dt, g, D)
        )
        B_BSGK, C_BSGK = B.to(wide), C.to(wide)
        if initial is None:
            shape = (x.shape[0], x.shape[2], B.shape[3], x.shape[3])
            initial = x.new_zeros(shape, dtype=wide)
        S_BGRKV = initial.to(wide).unflatten(1, grouped)
        outputs = []
        for t in range(x.shape[1]):
            key, query = (y[:, t, :, None, :, None] for y in (B_BSGK, C_BSGK))
            written = dt_BSGR[:, t, :, :, None] * x_BSGRV[:, t]
            S_BGRKV = g_BSGR[:, t, :, :, None, None].exp() * S_BGRKV + key * written[..., None, :]
            read = (S_BGRKV * query).sum(-2)
            outputs.append((read + D_BSGRV[:, t] * x_BSGRV[:, t]).flatten(1, 2))
        o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
        return o.to(x.dtype), S_BGRKV.flatten(1, 2)
