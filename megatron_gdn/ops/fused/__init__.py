"""Everything between in_proj and out_proj as one autograd function, with kernels of its own.

:func:`gated_delta_mixer` is the entry. Nothing here imports triton, fla or flash_qla before a
GPU tensor needs them.
"""

from .cores import Core, resolve_core
from .mixer import GatedNorm, gated_delta_mixer
from .prepared import SplitSequences
from .sizes import HeadSizes

__all__ = ["Core", "GatedNorm", "HeadSizes", "SplitSequences", "gated_delta_mixer", "resolve_core"]
