"""Context parallelism: sequence layouts and the schemes that run the layer over them."""

from .choice import LinearCpMode
from .chunkwise import Chunkwise
from .headwise import (
    Headwise,
    SingleRank,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from .schemes import ContextParallel, Scheme
from .zigzag import SequenceLayout, inverse, local_indices, rank_order_of_sequence

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
