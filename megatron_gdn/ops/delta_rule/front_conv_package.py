"""The plain twin of :mod:`.front_triton` with its convolution by the package causal-conv1d."""

from functools import partial

from ..front.conv_package import convolve_rows
from . import front_torch

prepare_forward = partial(front_torch.prepare_forward, convolve=convolve_rows)
prepare_backward = partial(front_torch.prepare_backward, convolve=convolve_rows)
edges_of = front_torch.edges_of
