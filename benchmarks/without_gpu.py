"""A Hopper GPU, as far as compiling FlashQLA's kernels asks for one: they are compiled, not run.

What tilelang keeps on disk is keyed by the kernel, the target and the versions, so a cache that was
filled without a GPU serves a machine with one. Wants flash-qla, tilelang and nvcc.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

TARGET = {"kind": "cuda", "arch": "sm_90a"}


def stand_in_for_hopper(multiprocessors: int = 132) -> None:
    """From here on, what FlashQLA compiles is for Hopper, and what it runs leaves garbage.

    Args:
        multiprocessors: FlashQLA chooses among its kernels by their number.
    """
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=multiprocessors, name="Hopper", gcnArchName=""
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.synchronize = lambda device=None: None

    from tilelang.contrib import nvcc
    from tilelang.jit import JITImpl

    nvcc.get_target_compute_version = lambda target=None: "9.0"
    done = set()

    def compile_only(self, *args, **kwargs):
        case = (id(self), repr(args), repr(sorted(kwargs.items(), key=str)))
        if case not in done:
            done.add(case)
            self.target = TARGET
            self.compile(*args, **kwargs)
        return lambda *tensors, **named: None

    JITImpl.__call__ = compile_only
