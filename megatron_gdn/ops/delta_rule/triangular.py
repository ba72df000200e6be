"""The inverses of many small unit lower triangular matrices.

A batched triangular solve uses little of a GPU. So on a GPU an inverse is computed by
matrix products: first A^-1 and D^-1, then the corner (Higham, "Accuracy and Stability
of Numerical Algorithms", 14.2):

    [ A    ]^-1   [  A^-1                ]
    [ B  D ]    = [ -D^-1 B A^-1    D^-1 ]

(I + L)^-1 = (I - L)(I + L^2)(I + L^4)... is not used: if a key repeats, L has entries
near one, and powers of L reach 1e18 before they cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..host_tables import cached_by_stream


def unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)^-1``, contiguous, for strictly lower triangular ``L [..., C, C]``."""
    if L.is_cuda:
        return _invert_by_growing_blocks(L)
    return _invert_by_substitution(L)


def _invert_by_substitution(L: Tensor) -> Tensor:
    """Invert I + L by a triangular solve; on a CPU this is faster than many small
    products."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(
        L, identity.expand(L.shape), upper=False, unitriangular=True
    ).contiguous()


def _invert_by_growing_blocks(L: Tensor) -> Tensor:
    """Invert I + L by inverting its diagonal blocks of 1, 2, 4, ... rows, all blocks of
    one size at once.

    If X holds the inverses of the blocks of one size, and B the corners between pairs
    of blocks, then ``X - X B X`` holds the inverses of the blocks of twice the size.
    """
    C = L.shape[-1]
    identity, corners = _identity_and_corners(C, L.dtype, L.device)
    matrices = L.flatten(0, -3)
    # the blocks of two rows: I minus their corners
    inverse = torch.addcmul(identity, matrices, corners[0], value=-1)
    for corner in corners[1:]:
        inverse = torch.baddbmm(
            inverse, torch.bmm(inverse, matrices * corner), inverse, alpha=-1
        )
    return inverse.view(L.shape)


@cached_by_stream(32)
def _identity_and_corners(
    C: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The identity ``[C, C]``, and for each block size a 0/1 mask of the corners,
    ``[sizes, C, C]``, at least one. They are not inference tensors, since a later call
    may be under autograd."""
    with torch.inference_mode(False):
        number = torch.arange(C, device="cpu")
        block_size = 1
        corners = []
        while block_size < C or not corners:
            row_block = number[:, None] // block_size
            column_block = number[None, :] // block_size
            is_second = row_block % 2 == 1  # of a pair of blocks
            corners.append(is_second & (row_block == column_block + 1))
            block_size *= 2
        identity = torch.eye(C, dtype=dtype, device=device)
        return identity, torch.stack(corners).to(device, dtype)
