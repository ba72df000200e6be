"""Two streams that nothing orders: the second does not read tables that the first is to
copy."""

import pytest
import torch

from megatron_gdn.ops.host_tables import cached_by_stream, to_device

pytestmark = pytest.mark.gpu


def test_a_table_waits_for_no_other_stream():
    @cached_by_stream(4)
    def ascending(tokens: int) -> torch.Tensor:
        return to_device(torch.arange(tokens), "cuda")

    busy = torch.cuda.Stream()
    free = torch.cuda.Stream()
    # what CUDA loads or allocates first would wait for both
    for stream in (busy, free):
        with torch.cuda.stream(stream):
            ascending(10).sum().item()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)  # about a second
        first = ascending(1000)
    with torch.cuda.stream(free):
        second = ascending(1000)
        total = second.sum()
        free.synchronize()
        assert not busy.query(), "the first stream was to be busy meanwhile"
        assert total.item() == 499_500
    torch.cuda.synchronize()
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)
