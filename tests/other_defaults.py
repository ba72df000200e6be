"""Other defaults of torch, which no result may follow."""

import sys
from collections.abc import Callable
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


def by_both_defaults[Made](make: Callable[[], Made]) -> tuple[Made, Made]:
    """What ``make()`` gives under the other defaults, and under the usual ones."""
    forget_tables()
    usual = make()
    forget_tables()
    with other_defaults():
        return make(), usual


def forget_tables():
    """Empty the caches of what is made from sizes, so that it is made anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_gdn."):
            for x in list(vars(module).values()):
                if getattr(x, "cache_parameters", dict)().get("maxsize"):
                    x.cache_clear()
