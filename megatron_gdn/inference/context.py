"""An inference context for requests of different lengths in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from ..ops.generation.requests import Request, RequestPool


class _NoKeys(dict):
    """Where attention layers would keep keys and values."""

    def __contains__(self, layer: object) -> NoReturn:
        raise NotImplementedError(
            "a RequestsContext carries recurrent states only: requests of different lengths have "
            "no common offset for an attention layer's keys. Generate with models that have "
            "attention layers through a StaticInferenceContext."
        )


class RequestsContext(StaticInferenceContext):
    """The requests of one forward: row n of the batch, or packed sequence n, is request n.

    Requests may have had different numbers of tokens before. Packed with ``PackedSeqParams``, they
    may also have different numbers of tokens in one forward, none included. For models whose mixers
    are all recurrent.

    Args:
        pool: from :func:`.layer.pool_for`.
        requests: of this forward, in order; may be set anew before each.
        keep_steps: keep the states after each token of a forward of a few tokens, so that
            ``pool.roll_back`` can return to any of them.
        slots: int64 ``[N]`` on the device, in place of ``requests``: one token each of the requests
            in these slots. Only the kernels read the numbers, so a forward can be captured in a
            CUDA graph and replayed for other slots. Nothing is checked and no token is counted:
            after a replay the pool does not refuse to roll back an earlier step.
    """

    def __init__(
        self,
        pool: RequestPool,
        requests: Sequence[Request] = (),
        *,
        keep_steps: bool = False,
        slots: Tensor | None = None,
    ) -> None:
        super().__init__(max_batch_size=pool.slots, max_sequence_length=1)
        self.pool, self.requests, self.keep_steps = pool, list(requests), keep_steps
        self.slots = slots
        self.key_value_memory_dict = _NoKeys()
        self.config.materialize_only_last_token_logits = False
