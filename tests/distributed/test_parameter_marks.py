"""Two tensor-parallel ranks equal one, however torch replaced the layer's parameters.

fp32 on gloo; 1e-5 of the largest entry, as in test_layer_parallel.py.
"""

import pytest

from tests.distributed import mark_laws as laws


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("called", [False, True], ids=["fused norm", "norm as a module"])
def test_gradients_do_not_hang_on_parameter_objects(pools, called, sequence_parallel):
    pools(2).run(laws.gradients_equal_one_rank, called, sequence_parallel)


def test_a_norm_that_is_called_waits_for_its_parameters(pools):
    pools(2).run(laws.a_called_norm_waits_for_its_parameters)
