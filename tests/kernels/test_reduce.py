"""The second stage of cross-token sums: partial rows added into tensors of several
dtypes."""

import pytest
import torch

from megatron_gdn.ops.kernels.reduce import sum_rows

OUTS = {
    "one": [((130,), torch.bfloat16)],
    "two": [((40, 1, 4), torch.bfloat16), ((3,), torch.float32)],
    "four": [
        ((7, 1, 4), torch.bfloat16),
        ((200,), torch.float16),
        ((1,), torch.float32),
        ((5,), torch.float32),
    ],
}


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [0, 1, 9, 300])
@pytest.mark.parametrize("outs", OUTS.values(), ids=OUTS)
def test_each_out_has_its_columns(outs, rows, device):
    """Sums of small integers are exact in any order, and below 256 in bf16 too."""
    made = [torch.full(shape, 7.0, dtype=dtype, device=device) for shape, dtype in outs]
    make = torch.Generator().manual_seed(3)
    columns = sum(out.numel() for out in made)
    partial = torch.randint(-1, 2, (rows, columns), generator=make).float().to(device)
    sum_rows(partial, *made)
    begin = 0
    for out in made:
        exact = partial[:, begin : begin + out.numel()].sum(0).to(out.dtype)
        assert torch.equal(out.flatten(), exact)
        begin += out.numel()


@pytest.mark.parametrize("widths", [(), (3,), (3, 3), (1, 1, 1, 1, 1)], ids=str)
def test_outs_that_do_not_take_all_columns_are_refused(widths, device):
    partial = torch.zeros(2, 5, device=device)
    with pytest.raises(AssertionError):
        sum_rows(partial, *(torch.zeros(width, device=device) for width in widths))
