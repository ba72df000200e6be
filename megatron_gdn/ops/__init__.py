"""The mathematics of the layer; needs torch and nothing else."""

from .conv import causal_conv1d
from .delta_rule.api import gated_delta_rule
from .delta_rule.chunk import torch_chunk_gated_delta_rule
from .delta_rule.recurrent import recurrent_gated_delta_rule
from .delta_rule.resolve import resolve_rule
from .documents import Documents
from .gates import decay_and_write_gates
from .layout import Layout
from .norm import l2norm, rms_norm, rms_norm_gated
from .static_documents import StaticDocuments

__all__ = [
    "Documents",
    "Layout",
    "StaticDocuments",
    "causal_conv1d",
    "decay_and_write_gates",
    "gated_delta_rule",
    "l2norm",
    "recurrent_gated_delta_rule",
    "resolve_rule",
    "rms_norm",
    "rms_norm_gated",
    "torch_chunk_gated_delta_rule",
]
