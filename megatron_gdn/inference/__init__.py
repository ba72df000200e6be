"""Generation: sequences that go on from a carried history and state.

    carry      what a sequence hands from one call to the next
    step       prefill and decode of projection rows
    gdn        the Gated DeltaNet for them
    mamba2     Mamba2 for them
    requests   carries of many requests and layers, in slots
    static     carries in Megatron's StaticInferenceContext

These need torch alone. ``context`` (a Megatron context over a pool of requests) and ``layer``
(:func:`.layer.pool_for` a model) need Megatron.
"""

from ..ops.generation.carry import Carry, CarryShape, choose
from ..ops.generation.step import RowMixer, decode, prefill
from .gdn import gdn_rows
from .mamba2 import mamba2_rows
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
