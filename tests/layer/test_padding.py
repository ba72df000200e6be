"""Padding at the end of a slot, a sequence or a batch's rows reaches nothing that the
loss sees."""

import pytest
import torch

from tests.distributed.layer_laws import build, forward_backward, randomise_, thd

pytestmark = pytest.mark.usefixtures("one_rank")

SLOTS = (8, 72, 8, 4)
REAL = (5, 67, 0, 4)


def in_real_rows() -> torch.Tensor:
    parts = [torch.arange(slot) < real for slot, real in zip(SLOTS, REAL, strict=True)]
    return torch.cat(parts)


def results(layer, x, packed, real):
    """Real rows of the output and of the input's gradient, and every parameter's
    gradient."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found = forward_backward(layer, x, packed, weight=weight * real[:, None, None])
    in_padding = found["input"][~real]
    return found | {name: found[name][real] for name in ("output", "input")}, in_padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["packed", "batch"])
def test_finite_garbage_in_the_padding_changes_no_bit(kind, dtype):
    layer = build()
    randomise_(layer)
    layer = layer.to(dtype)
    if kind == "packed":
        x = torch.randn(sum(SLOTS), 1, 24)
        real = in_real_rows()
        packed = thd(SLOTS, real_lengths=REAL)
    else:
        x = torch.randn(70, 2, 24)
        real = torch.arange(70) < 67
        packed = None
    garbage = x.clone()
    garbage[~real] = 1e3 * torch.randn_like(x[~real])
    clean, _ = results(layer, x.to(dtype), packed, real)
    dirty, in_padding = results(layer, garbage.to(dtype), packed, real)
    for name, value in clean.items():
        assert value.abs().max() > 0 and torch.equal(value, dirty[name]), name
    assert (in_padding == 0).all()
