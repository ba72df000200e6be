"""Generation: sequences that go on from a carried history and state.

    carry      what a sequence hands from one call to the next
    step       prefill and decode of projection rows
    requests   carries of many requests and layers, in slots

These need torch alone.
"""

from .carry import Carry, CarryShape, choose
from .requests import Request, RequestPool
from .step import RowMixer, decode, gdn_rows, prefill

__all__ = [
    "Carry",
    "CarryShape",
    "Request",
    "RequestPool",
    "RowMixer",
    "choose",
    "decode",
    "gdn_rows",
    "prefill",
]
