"""The rules of Kimi Delta Attention: the gated delta rule with a decay per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleInputs
from ..ops.delta_rule.plain import PlainRule
from ..ops.documents import Documents
from ..ops.obstacles import FLA_IS_TIMED, why_not_fla
from ..ops.rules.base import in_one_row, in_rows
from ..ops.rules.choice import Choice, Kernels, choose
from ..ops.rules.token_rule import recurrence
from ..ops.state_maps.state_map import StateShape
from .cudnn import CudnnKDA, why_not_cudnn
from .fla import FlaKDA, why_not_callable


def recurrent_kda(
    inputs: RuleInputs, documents: Documents | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token, in fp32 (fp64 for fp64); see :func:`..ops.rules.token_rule.recurrence`.

    ``documents``: all batch rows end to end; None when a row is one sequence.
    """
    rows, dtype = inputs.v.shape[:2], inputs.v.dtype
    offsets = None if documents is None else documents.filled_offsets
    inputs = inputs if documents is None else in_one_row(inputs)
    q, k, v, g, beta = (x.to(torch.promote_types(dtype, torch.float32)) for x in inputs)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    o, final = recurrence(q * k.shape[-1] ** -0.5, k, v, g, beta, initial, offsets)
    return in_rows(o.to(dtype), rows), final


def choose_kda(
    backend: str,
    state: StateShape,
    lower_bound: float | None,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    *,
    aligned: bool = False,
) -> Choice:
    """The rule of a Kimi Delta Attention, from dtype, device and installed packages alone.

    Args:
        backend: ``"fla"``, ``"cudnn"`` (cudnn-frontend's kernels for Hopper, by this name alone),
            ``"reference"`` (plain torch) or ``"auto"``, fla where it runs.
        lower_bound: of the log-decay. From -5 on fla takes faster kernels; cuDNN takes no other.
        deterministic, aligned: see :func:`..ops.rules.choice.choose`, which has the errors too.
    """
    K, V = state.rows, state.columns
    kernels = {
        "fla": Kernels(
            lambda: why_not_fla(device, dtype, K, why_not_callable),
            lambda: FlaKDA(lower_bound), "fla runs here", FLA_IS_TIMED,
        ),
        "cudnn": Kernels(
            lambda: why_not_cudnn(device, dtype, K, V, lower_bound), CudnnKDA,
            unsteady="cuDNN cuts a sequence into pieces by the number of all sequences",
            by_name=True,
        ),
    }  # fmt: skip
    return choose(
        backend, "Kimi Delta Attention", kernels, PlainRule,
        device=device, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip
