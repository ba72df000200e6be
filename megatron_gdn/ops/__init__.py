"""The mathematics of the layer; needs torch and nothing else."""

from .conv import causal_conv1d
from .documents import Documents
from .gates import decay_and_write_gates
from .gdn.rule.api import gated_delta_rule
from .gdn.rule.chunk import torch_chunk_gated_delta_rule
from .gdn.rule.recurrent import recurrent_gated_delta_rule
from .gdn.rule.resolve import resolve_rule
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
