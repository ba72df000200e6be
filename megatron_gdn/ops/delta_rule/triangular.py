"""The inverse of many small unit lower triangular matrices, from matrix products.

A batched triangular solve uses little of a GPU. So both halves of a matrix are inverted first, and
two products give the corner (Higham, "Accuracy and Stability of Numerical Algorithms", 14.2):

    [ A    ]^-1   [  A^-1                ]
    [ B  D ]    = [ -D^-1 B A^-1    D^-1 ]

The product (I - L)(I + L^2)(I + L^4)... is not used: if a key repeats, L has entries near one, and
powers of L reach 1e18 before they cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..host_tables import cached_by_stream

_SMALL = 16


def unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)^-1``, contiguous, for strictly lower triangular ``L [..., C, C]``."""
    C = rows = L.shape[-1]
    while rows > _SMALL and rows % 2 == 0:
        rows //= 2
    small = _invert_by_growing_blocks if L.is_cuda else _by_substitution
    if rows == C:
        return small(L)
    matrices = L.flatten(0, -3)
    inverse = torch.zeros(matrices.shape, dtype=L.dtype, device=L.device)
    _diagonal_blocks(inverse, rows).copy_(small(_diagonal_blocks(matrices, rows)))
    while rows < C:
        for start in range(0, C, 2 * rows):
            upper, lower = slice(start, start + rows), slice(start + rows, start + 2 * rows)
            left = torch.bmm(inverse[:, lower, lower], matrices[:, lower, upper])
            corner = inverse[:, lower, upper]
            corner.baddbmm_(left, inverse[:, upper, upper], beta=0, alpha=-1)
        rows *= 2
    return inverse.view(L.shape)


def _diagonal_blocks(matrices: Tensor, rows: int) -> Tensor:
    """``[b, C, C]`` -> ``[b, C / rows, rows, rows]``, a view."""
    b, C, _ = matrices.shape
    blocks = matrices.view(b, C // rows, rows, C // rows, rows)
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _by_substitution(L: Tensor) -> Tensor:
    """Invert by a triangular solve, which on a CPU is faster than many small products."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(
        L, identity.expand(L.shape), upper=False, unitriangular=True
    ).contiguous()


def _invert_by_growing_blocks(L: Tensor) -> Tensor:
    """Invert diagonal blocks of 1, 2, 4, ... rows; all blocks of one size are inverted at once.

    With X the blocks' inverses and B the corners between pairs of blocks, the next X is
    ``X - X B X``.
    """
    C = L.shape[-1]
    identity, corners = _identity_and_corners(C, L.dtype, L.device)
    corners = corners.view(-1, *(1,) * (L.dim() - 2), C, C)
    first, *later = (L * corners).flatten(1, -3).unbind(0)
    inverse = identity - first
    for B in later:
        inverse = torch.baddbmm(inverse, torch.bmm(inverse, B), inverse, alpha=-1)
    return inverse.view(L.shape)


@cached_by_stream(32)
def _identity_and_corners(
    C: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The identity ``[C, C]``, and ones at the corners between blocks, ``[levels, C, C]``."""
    with torch.inference_mode(False):
        place, rows, corners = torch.arange(C, device="cpu"), 1, []
        while rows < C or not corners:
            block = place // rows
            odd = block[:, None] % 2 == 1
            corners.append(odd & (block[:, None] == block[None, :] + 1))
            rows *= 2
        return torch.eye(C, dtype=dtype, device=device), torch.stack(corners).to(device, dtype)
