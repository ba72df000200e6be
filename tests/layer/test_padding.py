"""Padding at the end of a packed slot, or of a sequence, reaches nothing that the loss sees."""

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.specs import gated_delta_net_spec
from tests.distributed.layer_laws import randomise_, thd
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")

SLOTS, REAL = (8, 72, 8, 4), (5, 67, 0, 4)


def in_real_rows() -> torch.Tensor:
    parts = [torch.arange(slot) < real for slot, real in zip(SLOTS, REAL, strict=True)]
    return torch.cat(parts)


def results(layer, x, packed, real):
    """Real rows of the output and of the input's gradient, and every parameter's gradient."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, _ = layer(x, None, packed_seq_params=packed)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    (out * weight * real[:, None, None]).sum().backward()
    found = {"output": out[real], "input gradient": x.grad[real]}
    return found | {name: p.grad for name, p in layer.named_parameters()}, x.grad[~real]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["packed", "batch"])
def test_finite_garbage_in_the_padding_changes_no_bit(kind, dtype):
    layer = build_module(gated_delta_net_spec("local"), make_config(), layer_number=1)
    randomise_(layer)
    layer = layer.to(dtype)
    if kind == "packed":
        x, real = torch.randn(sum(SLOTS), 1, 24), in_real_rows()
        packed = thd(SLOTS, real_lengths=REAL)
    else:
        x, real, packed = torch.randn(70, 2, 24), torch.arange(70) < 67, None
    garbage = x.clone()
    garbage[~real] = 1e3 * torch.randn_like(x[~real])
    clean, _ = results(layer, x.to(dtype), packed, real)
    dirty, in_padding = results(layer, garbage.to(dtype), packed, real)
    for name, value in clean.items():
        assert value.abs().max() > 0 and torch.equal(value, dirty[name]), name
    assert (in_padding == 0).all()
