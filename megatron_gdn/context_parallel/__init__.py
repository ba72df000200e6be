"""Context parallelism: sequence layouts, and schemes that run a mixer on several
ranks."""

from .chunkwise.scheme import Chunkwise
from .headwise.functional import (
    MambaContextParallel,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from .headwise.scheme import Headwise
from .layouts import SequenceLayout, inverse, local_indices, rank_order_of_sequence
from .price import LinearCpMode
from .scheme import Passage, Scheme, WholeSequences

__all__ = [
    "Chunkwise",
    "Headwise",
    "LinearCpMode",
    "MambaContextParallel",
    "Passage",
    "Scheme",
    "SequenceLayout",
    "WholeSequences",
    "get_parameter_local_cp",
    "inverse",
    "local_indices",
    "rank_order_of_sequence",
    "tensor_a2a_cp2hp",
    "tensor_a2a_hp2cp",
]
