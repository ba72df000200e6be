"""One optimizer step of Megatron's, and its loss and gradient norm.

If one of them is not finite, all ranks end the run before the optimizer changes any
weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pretraining.feed import Feed


class NotFiniteError(Exception):
    """A loss or gradient norm that is NaN or inf.

    Attributes:
        weights_step: the step that made the weights behind the number; 0 for the
            weights of the start.
    """

    def __init__(self, message: str, weights_step: int) -> None:
        super().__init__(message)
        self.weights_step = weights_step


def train_step(
    args, training, feed: Feed, device: torch.device, iteration: int
) -> dict[str, float]:
    """One optimizer step; returns what `Report.step` records.

    Raises:
        NotFiniteError: on all ranks, with the weights as they were.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    started = time.perf_counter()
    training.model.zero_grad_buffer()
    training.optimizer.zero_grad()
    # A packed buffer is one row of micro_batch_size x seq_length tokens.
    rows = 1 if args.packing else args.micro_batch_size
    sums = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=feed,
        model=training.model,
        num_microbatches=args.num_micro_batches,
        seq_length=args.micro_batch_size * args.seq_length // rows,
        micro_batch_size=rows,
    )
    loss, tokens = mean_loss(sums, device)
    grad_norm = gradient_norm(training.optimizer)
    require_finite(iteration, device, loss=loss, grad_norm=grad_norm)
    lr = training.optimizer.param_groups[0]["lr"]
    training.optimizer.step()
    training.scheduler.step(increment=1)
    return {
        "loss": loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens": tokens,
        "seconds": time.perf_counter() - started,
    }


def forward_step(feed: Feed, model):
    """Megatron's forward step: the model's per-token losses, and how to reduce them."""
    batch = next(feed)
    loss_per_token = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
    )
    return loss_per_token, partial(masked_sum, batch.loss_mask)


def masked_sum(loss_mask: Tensor, loss_per_token: Tensor):
    """Sum of the losses that count (fp32), how many there are, and both for the
    report."""
    total = (loss_per_token.float() * loss_mask).sum()
    tokens = loss_mask.sum()
    return total, tokens.to(torch.int), torch.stack((total.detach(), tokens))


def mean_loss(sums: Iterable[Tensor], device: torch.device) -> tuple[float, int]:
    """Mean loss per token over all ranks, and the number of tokens, the same on every
    rank.

    Args:
        sums: `masked_sum`'s last value of each micro-batch; empty on all but the last
            pipeline stage.
    """
    from megatron.core import parallel_state

    total = torch.zeros(2, device=device)
    for part in sums:
        total += part
    ranks: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=ranks)
    stages: Any = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(
        total, parallel_state.get_pipeline_model_parallel_last_rank(), group=stages
    )
    loss_sum, tokens = total.tolist()
    return loss_sum / tokens, int(tokens)


def gradient_norm(optimizer) -> float:
    """The norm before clipping; the optimizer's step computes it again."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def require_finite(
    iteration: int, device: torch.device, *, loss: float, grad_norm: float
) -> None:
    """Raise on all ranks if a number of one rank is not finite; a collective of all
    ranks."""
    bad = not (math.isfinite(loss) and math.isfinite(grad_norm))
    anywhere = torch.tensor([float(bad)], device=device)
    torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
    if anywhere.item():
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        number = loss if what == "loss" else grad_norm
        raise NotFiniteError(
            f"the {what} of step {iteration} is {number}, so the run stops before "
            "that step changes the weights",
            weights_step=iteration - 1,
        )
