"""Other defaults of torch, which no result may follow."""

from contextlib import contextmanager

import torch


@contextmanager
def other_defaults():
    """On meta, which stands for a GPU, a table has no values; in fp64 sums have other
    bits."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
