"""What a layer says of documents that continue others where it cannot run them."""

import pytest
import torch

from megatron_gdn import tree_packed_seq_params
from tests.layer.test_layer import build
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def test_batch_invariant_mode_is_refused():
    layer = build(make_config(batch_invariant_mode=True))
    params = tree_packed_seq_params([3, 2], [-1, 0], device="cpu")
    with pytest.raises(NotImplementedError, match="begin anew in every document"):
        layer(torch.randn(5, 1, 24), None, packed_seq_params=params)


def test_a_batch_of_rows_is_refused():
    params = tree_packed_seq_params([3, 2], [-1, 0], device="cpu")
    with pytest.raises(ValueError, match="packed documents need a batch of 1"):
        build()(torch.randn(5, 2, 24), None, packed_seq_params=params)
