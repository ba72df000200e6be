"""Tables made on the host from lengths, on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(table: Tensor, device: torch.device | str) -> Tensor:
    """``table`` on ``device``, without the host waiting for work already queued there.

    A copy from ordinary memory waits; from pinned memory it takes its turn in the stream. Tables
    outlive the call that made them, so they are ordinary tensors even when that was an evaluation
    under ``torch.inference_mode``, whose tensors autograd refuses.
    """
    with torch.inference_mode(False):
        table = table.clone() if table.is_inference() else table
        if torch.device(device).type != "cuda":
            return table.to(device)
        return table.pin_memory().to(device, non_blocking=True)
