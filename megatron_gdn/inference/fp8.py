"""Any number of tokens through linears that compute in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import fp8_utils
from torch import Tensor

from ..mixers.fp8 import quantises

# Of Transformer Engine's linears: FP8 copies of weights, from before the optimizer's last step, and
# whether the next forward makes them again.
_KEPT = ("_fp8_workspaces", "is_first_microbatch")


@contextmanager
def padded_for_fp8(model: Any) -> Iterator[None]:
    """Inside, FP8 linears pad their tokens to what FP8 takes, as in Megatron's own engines.

    They make FP8 copies of the weights as these are now, and let go of them at the end. The history
    of delayed scaling does not see what they compute.

    Args:
        model: a HybridModel or GPTModel, not wrapped.
    """
    utils: Any = fp8_utils
    linears = [m for m in model.modules() if hasattr(m, "_fp8_workspaces")]
    if not linears or not quantises(model.config):
        yield
        return
    padded = utils._fp8_inference_wrapped_modules
    padded_before = set(padded)
    before = [{n: vars(m)[n] for n in (*_KEPT, "forward") if n in vars(m)} for m in linears]
    histories = [None if (h := _amax_history(m)) is None else h.clone() for m in linears]
    try:
        for linear in linears:
            linear._fp8_workspaces = {}
        utils.prepare_model_for_fp8_inference(model)
        yield
    finally:  # padding that stays would gather a sequence-parallel input of training twice
        for linear, kept, history in zip(linears, before, histories, strict=True):
            vars(linear).pop("forward", None)
            vars(linear).update(kept)
            if linear not in padded_before:
                padded.discard(linear)
            if (now := _amax_history(linear)) is not None:
                now.zero_() if history is None else now.copy_(history)


def _amax_history(linear: Any) -> Tensor | None:
    """Of the forward's operands; None before the first forward and without delayed scaling."""
    return getattr(linear.fp8_meta.get("scaling_fwd"), "amax_history", None)
