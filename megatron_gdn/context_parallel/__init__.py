"""Context parallelism: sequence layouts and the schemes that run the layer over them."""

from .chunkwise.scheme import Chunkwise
from .headwise.scheme import (
    Headwise,
    SingleRank,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from .layouts import SequenceLayout, inverse, local_indices, rank_order_of_sequence
from .price import LinearCpMode
from .schemes import ContextParallel, Scheme

__all__ = [
    "Chunkwise",
    "ContextParallel",
    "Headwise",
    "LinearCpMode",
    "Scheme",
    "SequenceLayout",
    "SingleRank",
    "get_parameter_local_cp",
    "inverse",
    "local_indices",
    "rank_order_of_sequence",
    "tensor_a2a_cp2hp",
    "tensor_a2a_hp2cp",
]
