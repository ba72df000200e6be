"""Products whose bits depend on their shape, as in some machine's library: a law of
equal bits between products of two shapes fails here everywhere. It replaces the CPU's
kernels for good."""

import os
import warnings
import zlib
from functools import cache

import torch
from torch import Tensor

ASKED_BY = "BITS_BY_SHAPE"


@cache  # once per process: torch refuses to replace a kernel twice
def hold_if_asked() -> None:
    """Replaces the CPU's products in this process if the environment has
    ``BITS_BY_SHAPE=1``."""
    if os.environ.get(ASKED_BY) != "1":
        return
    with warnings.catch_warnings():
        # replaces kernels: that is the aim
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in _KERNELS.items():
            torch.library.impl(f"aten::{name}", "CPU", kernel)
    torch.backends.cuda.enable_flash_sdp(False)  # attention in products, on a CPU too


def first_part(*shape: int) -> int:
    """How many of the inner dimension, the last of ``shape``, a product adds up
    first."""
    inner = shape[-1]
    return inner if inner < 2 else 1 + zlib.crc32(repr(shape).encode()) % (inner - 1)


def _into(out: Tensor, added: Tensor, a: Tensor, b: Tensor, beta=1, alpha=1) -> Tensor:
    """``out = beta added + alpha a @ b``, of matrices or batches of them."""
    product = torch.addmm if a.dim() == 2 else torch.baddbmm
    c = first_part(*a.shape[:-1], b.shape[-1], a.shape[-1])
    product(added, a[..., :c], b[..., :c, :], beta=beta, alpha=alpha, out=out)
    if c < a.shape[-1]:
        product(out, a[..., c:], b[..., c:, :], alpha=alpha, out=out)
    return out


def _empty(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _product(a: Tensor, b: Tensor) -> Tensor:
    out = _empty(a, b)
    return _into(out, out, a, b, beta=0)


def _product_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return _into(out, out, a, b, beta=0)


def _added(added: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    return _into(_empty(a, b), added, a, b, beta, alpha)


def _added_in_place(added: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    return _into(added, added, a, b, beta, alpha)


# `addmm.out` and `baddbmm.out` stay the machine's: the others are made of them.
_KERNELS = {
    "mm": _product,
    "mm.out": _product_out,
    "bmm": _product,
    "bmm.out": _product_out,
    "addmm": _added,
    "addmm_": _added_in_place,
    "baddbmm": _added,
    "baddbmm_": _added_in_place,
}
