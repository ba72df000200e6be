"""Parts of a clone of Megatron-Bridge, without what the import of its whole package asks for."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock, patch

import pytest
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import nn

FOLDER = os.environ.get("MEGATRON_BRIDGE")
needs_bridge = pytest.mark.skipif(
    not FOLDER, reason="MEGATRON_BRIDGE=folder names a clone of NVIDIA-NeMo/Megatron-Bridge"
)


def eval_cp_context(folder: str) -> Callable:
    """Bridge's function of this name: a model evaluates under another context-parallel size."""
    if not te.HAVE_TE:
        te.TEDotProductAttention = type("TEDotProductAttention", (), {})
    (path,) = Path(folder).rglob("eval_context_parallel_rebinding.py")
    spec = importlib.util.spec_from_file_location("rebinding", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.eval_cp_context


def peft_class(folder: str, kind: str) -> type:
    """Bridge's ``"LoRA"`` or ``"DoRA"``."""
    (place,) = Path(folder).rglob("megatron/bridge")
    package = ModuleType("megatron.bridge")
    package.__path__ = [str(place)]
    sys.modules.setdefault("megatron.bridge", package)
    importlib.import_module("megatron.bridge.peft.utils").HAVE_TE = te.HAVE_TE
    engine = ["transformer_engine", "transformer_engine.pytorch"]
    mocks = {} if te.HAVE_TE else {name: MagicMock() for name in engine}
    with patch.dict(sys.modules, mocks):
        return getattr(importlib.import_module(f"megatron.bridge.peft.{kind.lower()}"), kind)


def adapted(
    folder: str, kind: str, linear: ColumnParallelLinear, path: str, rank: int
) -> nn.Module:
    """A linear in Bridge's "LoRA" or "DoRA", told by its ``path`` in a model."""
    peft = peft_class(folder, kind)
    linear.tp_size = linear.tp_group.size()  # which Transformer Engine's linears know
    prefix, name = path.rsplit(".", 1)
    return peft(target_modules=[name], dim=rank).transform(linear, name, prefix)
