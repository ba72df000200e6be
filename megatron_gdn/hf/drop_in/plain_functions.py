"""transformers' own forward on CPU tensors, in an environment that has fla or causal-conv1d.

transformers decides at import: if these packages are installed, its functions call their kernels
for tensors of any device. The kernels run on a GPU only.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .families import transformers_class

_FUNCTIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


class _ByDevice:
    """Calls transformers' plain function for CPU tensors, else the function it chose at import."""

    def __init__(self, chosen: Callable[..., Any]) -> None:
        functools.update_wrapper(self, chosen)
        self._chosen, self._plain = chosen, inspect.unwrap(chosen)
        self._names = frozenset(inspect.signature(self._plain).parameters)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        # No plain function reads boundaries of documents; the chosen function refuses them.
        packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        if packed or x.device.type != "cpu":
            return self._chosen(x, *args, **kwargs)
        known = {name: value for name, value in kwargs.items() if name in self._names}
        return self._plain(x, *args, **known)


def plain_functions_on_cpu(model: nn.Module) -> None:
    """Let transformers' own linear attention run on CPU tensors, with any packages installed.

    Without it, a CPU fails with ``0 active drivers ([])`` where flash-linear-attention is
    installed. :func:`.patching.patch` does it too; call it for a model that is not patched. It
    replaces the functions of transformers' modeling files in this process; a tensor on another
    device runs what it ran before, so the model may move to a GPU later.

    Args:
        model: one of the models that :func:`.patching.patch` takes, or a part of one. Other
            models are not changed. Functions that the package ``kernels`` has turned into modules
            are not changed either (set ``USE_HUB_KERNELS=NO``).
    """
    for module in model.modules():
        cls = transformers_class(module)
        if cls is None:
            continue
        source = sys.modules[cls.__module__]
        for name in _FUNCTIONS:
            chosen = getattr(source, name, None)
            if inspect.isfunction(chosen) and hasattr(chosen, "__wrapped__"):
                setattr(source, name, _ByDevice(chosen))
