"""New memory holds NaN, so a test notices what is read before it is written.

Integers and bools hold their largest value, as under torch's own filling.
"""

import contextlib
import functools
import os

import torch
from torch import Tensor
from torch.utils import _device

# Tests of large sizes make tensors whose memory they hardly touch.
_MOST_BYTES = 1 << 24
_MAKERS = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    Tensor: ("new_empty", "new_empty_strided"),
}


def fill_new_memory() -> None:
    """Fill what Python makes by ``torch.empty`` and its like, in this process and its
    forks."""
    if hasattr(torch.empty, "__wrapped__"):
        return
    # Under compute-sanitizer: its initcheck sees such reads, and a fill would hide them.
    if "SANITIZE_FOUND" in os.environ:
        return
    # torch keeps the functions that follow its default device: those that are called.
    _device._device_constructors()
    for home, names in _MAKERS.items():
        for name in names:
            setattr(home, name, _filled(getattr(home, name)))
    _keep_torchs_filling()


def _filled(make):
    @functools.wraps(make)
    def make_and_fill(*args, **kwargs):
        made = make(*args, **kwargs)
        if kwargs.get("out") is None and not torch.compiler.is_compiling():
            fill(made)
        return made

    return make_and_fill


def fill(x: Tensor) -> None:
    """Fill ``x`` with NaN, or with the largest value of its dtype."""
    if x.device.type == "meta" or x.numel() * x.element_size() > _MOST_BYTES:
        return
    if x.dtype.is_floating_point or x.dtype.is_complex:
        value = torch.nan
    elif x.dtype == torch.bool:
        value = True
    else:
        value = torch.iinfo(x.dtype).max
    x.detach().fill_(value)


def _keep_torchs_filling() -> None:
    """The mixers leave torch's filling on, where they switch it off outside tests."""
    from megatron_gdn.ops import switches

    switches._memory_unfilled = contextlib.nullcontext()
