"""The inverse of a unit lower triangular matrix from matrix products, for many small matrices.

A batched triangular solve walks down the rows one after the other, which leaves a GPU idle. Here a
matrix is cut in two, both halves are inverted side by side, and the corner follows:

    [ A    ]^-1   [  A^-1                ]
    [ B  D ]    = [ -D^-1 B A^-1    D^-1 ]

The corner is two products of inverses with the original entries, as in substitution by blocks, so
errors grow as they do there (Higham, "Accuracy and Stability of Numerical Algorithms", 14.2). The
shorter way, (I - L)(I + L^2)(I + L^4)..., is not used: powers of an L with entries near one (a key
that repeats) reach 1e18 before they cancel.

Legend: C rows and columns of a matrix, any number of leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 16


def unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)^-1`` for strictly lower triangular ``L``.

    Args:
        L: ``[..., C, C]``, any C; entries on and above the diagonal must be zero.

    Returns:
        ``[..., C, C]``, contiguous, in ``L.dtype``.
    """
    C = L.shape[-1]
    if C <= _SMALL or C % 2:
        return _by_growing_blocks(L) if L.is_cuda else _by_substitution(L)
    half = C // 2
    both = unit_lower_inverse(torch.stack([L[..., :half, :half], L[..., half:, half:]]))
    inverse = L.new_zeros(L.shape)
    inverse[..., :half, :half], inverse[..., half:, half:] = both
    corner = both[1] @ L[..., half:, :half] @ both[0]
    torch.neg(corner, out=inverse[..., half:, :half])
    return inverse


def _by_substitution(L: Tensor) -> Tensor:
    """Quicker where there is nothing to fill with many small products."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(
        L, identity.expand(L.shape), upper=False, unitriangular=True
    ).contiguous()


def _by_growing_blocks(L: Tensor) -> Tensor:
    """The same rule from the other end: diagonal blocks of 1, 2, 4, ... rows, all at once.

    With the inverse X of the block diagonal and the corners B that join its blocks in pairs, the
    inverse of the joined ones is ``X - X B X``.
    """
    C = L.shape[-1]
    place = torch.arange(C, device=L.device)
    below = place[:, None] == place[None, :] + 1
    inverse = torch.eye(C, dtype=L.dtype, device=L.device)
    inverse = inverse - torch.where(below & (place[:, None] % 2 == 1), L, 0)
    rows = 2
    while rows < C:
        block = place // rows
        joined = (block[:, None] % 2 == 1) & (block[:, None] == block[None, :] + 1)
        inverse = inverse - inverse @ torch.where(joined, L, 0) @ inverse
        rows *= 2
    return inverse
