"""Dropping the mixer's output between the forward and the backward of its reader."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def saved_tensors_are_hooked() -> bool:
    """Whether ``saved_tensors_hooks`` are on. They replace what autograd saves.

    A checkpoint (``use_reentrant=False``) keeps nothing, or what it computed again. An offload
    keeps a copy, which it may not have made yet. Neither reads the tensor after our hook has
    filled it again. So no tensor that is saved under such hooks may be dropped.
    """
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return hooks._top_saved_tensors_default_hooks(True) is not None


class RefilledOutput:
    """Frees a tensor that autograd still holds, and fills it again just before it is read.

    out_proj saves its input, the normed output of the mixer. One cheap pass computes it again from
    tensors that the mixer saves anyway. Use one object per forward:

        refilled = RefilledOutput()
        mixed = mix(..., refilled=refilled)
        out = out_proj(mixed)
        refilled.drop_until_backward_of(out)

    If :func:`saved_tensors_are_hooked`, nothing is dropped.
    """

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._refill: Callable[[Tensor], None] | None = None

    def remember(self, output: Tensor, refill: Callable[[Tensor], None]) -> None:
        """Called by the mixer: ``refill(x)`` writes the same bits as ``output`` into x."""
        self._output, self._refill = output.detach(), refill

    def passed_on(self, output: Tensor, send: Callable[[Tensor], Tensor]) -> None:
        """Called if the reader saves ``output = send(remembered)`` in place of the remembered."""
        made, refill = self._output, self._refill
        if made is None or refill is None:  # no tokens
            return
        shape = made.shape

        def refill_and_send(out: Tensor) -> None:
            rows = out.new_empty(shape)
            refill(rows)
            out.copy_(send(rows))

        self.remember(output, refill_and_send)

    def drop_until_backward_of(self, out: Tensor) -> None:
        """Free the storage now; fill it again once the gradient of ``out`` is known.

        Does nothing if ``out`` needs no gradient: the storage is then freed with its last user.
        """
        output, refill = self._output, self._refill
        self._output = self._refill = None
        if output is None or refill is None or not out.requires_grad or saved_tensors_are_hooked():
            return
        storage = output.untyped_storage()
        size = storage.nbytes()

        def fill_again(_gradient: Tensor) -> None:
            if storage.nbytes() == 0:
                storage.resize_(size)
                with torch.no_grad():  # .data: autograd must not count this as a change
                    refill(output.data)
            hook.remove()  # else a reference to ``out`` keeps alive what the refill reads

        storage.resize_(0)
        hook = out.register_hook(fill_again)
