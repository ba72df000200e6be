"""Documents that training never sees, and the loss on them.

Their content alone selects them: equal files stay on one side, in any order of the
corpus.
"""

from __future__ import annotations

import hashlib
import math

import torch

from pretraining.corpus import Corpus
from pretraining.feed import Feed
from pretraining.step import NotFiniteError, forward_step, mean_loss

# One document in this many, at least one, and none of a corpus that has fewer.
ONE_IN = 20
# Enough for two digits of the loss, in the time of a few training steps.
MOST_MICRO_BATCHES = 8


def hold_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Split a corpus into documents to train on and held-out ones, both in its
    order."""
    contents = sorted(
        set(corpus.documents), key=lambda text: hashlib.sha256(text).digest()
    )
    # Empty documents are trained on: a loss over nothing but their ends says nothing.
    chosen = set([text for text in contents if text][: len(contents) // ONE_IN])
    kept = tuple(text for text in corpus.documents if text not in chosen)
    held = tuple(text for text in corpus.documents if text in chosen)
    return Corpus(kept, corpus.skipped), Corpus(held)


@torch.no_grad()
def held_out_loss(
    args, training, held_out: Corpus, device: torch.device
) -> tuple[float | None, str]:
    """The mean loss per byte of pieces of the held-out documents (or None), and a line
    about it.

    Every rank takes part.

    Raises:
        NotFiniteError: on all ranks, if the loss is not finite.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if not held_out.documents:
        return None, (
            f"no held-out loss: a corpus of fewer than {ONE_IN} documents is trained "
            "on whole"
        )
    feed = Feed.of(args, held_out, device)
    per_rank = feed.micro_batches_per_epoch // args.data_parallel_size
    rows = 1 if args.packing else args.micro_batch_size
    training.model.eval()
    sums = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=feed,
        model=training.model,
        num_microbatches=min(max(per_rank, 1), MOST_MICRO_BATCHES),
        seq_length=args.micro_batch_size * args.seq_length // rows,
        micro_batch_size=rows,
        forward_only=True,
    )
    training.model.train()
    loss, labels = mean_loss(sums, device)
    if not math.isfinite(loss):  # the same number on every rank
        raise NotFiniteError(
            f"the held-out loss after step {args.train_iters} is {loss}",
            weights_step=args.train_iters,
        )
    return loss, (
        f"held-out loss {loss:.3f} nats per byte, over {labels:,} bytes of "
        f"{len(held_out.documents)} documents that training never saw"
    )
