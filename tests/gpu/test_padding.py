"""Padded batches on a GPU: the same rows as on the CPU, and who waits for whom."""

import warnings

import pytest
import torch

from megatron_gdn import pack_rows, unpack_rows

pytestmark = pytest.mark.gpu

MASK = torch.tensor([[1] * 100 + [2] * 27 + [0] * 3, [1] * 130, [0] * 5 + [4] * 125])


def there_and_back(x, weight, mask):
    x = x.detach().requires_grad_()
    packed, _ = pack_rows(x, mask, multiple_of=8)
    back = unpack_rows(packed, mask, multiple_of=8)
    (gradient,) = torch.autograd.grad(back, x, weight)
    return packed, back, gradient


@pytest.mark.parametrize(("where", "waits"), [("cpu", 0), ("cuda", 2)])  # one per call
def test_rows_are_those_of_the_cpu_and_the_host_waits_for_the_mask_alone(where, waits):
    x, weight = torch.randn(2, 130, 3, 64, dtype=torch.bfloat16)
    expected = there_and_back(x, weight, MASK)
    x = x.cuda()
    weight = weight.cuda()
    mask = MASK.to(where)
    there_and_back(x, weight, mask)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            actual = there_and_back(x, weight, mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA" in str(w.message) for w in caught) == waits
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.cpu(), e)
