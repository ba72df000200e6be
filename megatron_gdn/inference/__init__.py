"""Generation: a sequence continues from the conv history and the state of its earlier
tokens.

    Memory                   conv histories and states of sequences, in buffers of the
                             caller
    prefill, decode          run projection rows from the states in a Memory, and write
                             the new histories and states to it
    gdn_rows, kda_rows, ...  the stages of a mixer from tensors, without a module
    roll_back                drops the last tokens in Megatron's StaticInferenceContext

Only :mod:`.generate` needs Megatron.
"""

from ..mixers.static_context import MOST_DECODED, roll_back
from ..ops.generation.memory import Memory, MemoryShape, choose
from ..ops.generation.step import decode, prefill
from ..ops.stages import Stages as RowMixer
from .rows import gdn2_rows, gdn_rows, gdp_rows, kda_rows, mamba2_rows

__all__ = [
    "MOST_DECODED",
    "Memory",
    "MemoryShape",
    "RowMixer",
    "choose",
    "decode",
    "gdn2_rows",
    "gdn_rows",
    "gdp_rows",
    "kda_rows",
    "mamba2_rows",
    "prefill",
    "roll_back",
]
