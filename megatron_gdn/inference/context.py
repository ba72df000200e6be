"""An inference context for requests that each stand where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from .requests import Request, RequestPool


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

    Requests may stand at different lengths. Packed with ``PackedSeqParams``, they may also have
    different numbers of tokens in one forward, none included. For models whose mixers are all
    recurrent.

    Args:
        pool: from :func:`.layer.pool_for`.
        requests: of this forward, in order; may be set anew before each.
        keep_steps: keep the states after each token of a forward of a few tokens, so that
            ``pool.roll_back`` can return to any of them.
        slots: int64 ``[N]`` on the device, in place of ``requests``: one token each of the requests
            in these slots. The numbers are read by the kernels alone, so a forward can be captured
            in a CUDA graph and replayed for other slots; nothing is checked and no token counted,
            so after a replay the pool cannot tell that an earlier step is not to be rolled back.
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
