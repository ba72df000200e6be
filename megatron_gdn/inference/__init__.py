"""Generation: sequences that go on from a carried history and state.

    Carry                    what a sequence hands from one call to the next
    prefill, decode          projection rows that go on from a carry
    gdn_rows, mamba2_rows    the parts of a mixer that they run, those of training
    RequestPool              carries of many requests and layers, in slots
    roll_back                of carries in Megatron's StaticInferenceContext

These need torch alone. ``context`` (a Megatron context over a pool of requests) and ``layer``
(:func:`.layer.pool_for` a model) need Megatron.
"""

from ..ops.gdn import gdn_parts as gdn_rows
from ..ops.generation.carry import Carry, CarryShape, choose
from ..ops.generation.step import decode, prefill
from ..ops.mamba2 import mamba2_parts as mamba2_rows
from ..ops.parts import Parts as RowMixer
from .requests import Request, RequestPool
from .static import MOST_DECODED, roll_back

__all__ = [
    "MOST_DECODED",
    "Carry",
    "CarryShape",
    "Request",
    "RequestPool",
    "RowMixer",
    "choose",
    "decode",
    "gdn_rows",
    "mamba2_rows",
    "prefill",
    "roll_back",
]
