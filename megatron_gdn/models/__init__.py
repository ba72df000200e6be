"""The published models: sizes, Megatron configurations and specs, FLOPs, flags for a launch.

    parts = config("Qwen3.5-35B-A3B", tensor_model_parallel_size=2)
    model = HybridModel(parts.config, parts.spec, max_sequence_length=4096, **parts.arguments)

    find("Qwen3.5-35B-A3B").flags()          # of pretrain_hybrid.py
    find("Qwen3.5-35B-A3B").stack            # parameters, FLOPs, bytes of states
    build_model(find("Qwen3.5-35B-A3B").hf)  # megatron_gdn.hf: the model, for weights too

The command is ``python -m megatron_gdn.models``.
"""

from typing import Any

from .catalogue import ENTRIES, Entry, Model, Parts
from .stack import Flops, Stack, flops_per_step

__all__ = [
    "ENTRIES", "Entry", "Flops", "Model", "Parts", "Stack", "config", "find", "flops_per_step",
]  # fmt: skip

find = Model.named


def config(name: str, *args: Any, **options: Any) -> Parts:
    """Configuration, spec and constructor arguments of a model, see `Model.parts`."""
    return find(name).parts(*args, **options)
