"""Padding at the end of a slot, a sequence or a batch's rows reaches nothing that the loss sees."""

import pytest
import torch

from megatron_gdn import pack_rows, unpack_rows
from tests.distributed.layer_laws import build, forward_backward, randomise_, thd
from tests.parallel import assert_close

pytestmark = pytest.mark.usefixtures("one_rank")

SLOTS, REAL = (8, 72, 8, 4), (5, 67, 0, 4)


def in_real_rows() -> torch.Tensor:
    parts = [torch.arange(slot) < real for slot, real in zip(SLOTS, REAL, strict=True)]
    return torch.cat(parts)


def results(layer, x, packed, real):
    """Real rows of the output and of the input's gradient, and every parameter's gradient."""
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


# Document 1 of the first row and document 1 of the second meet: nothing may pass between them.
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 2, 2]])
DOCUMENTS = ((0, slice(0, 3)), (1, slice(0, 2)), (1, slice(2, 4)))

# Of the largest entry, in fp64: some hundred roundings to 2^-53, of terms that may cancel.
TOLERANCE = 1e-11


@pytest.mark.parametrize("multiple_of", [1, 4], ids=["end to end", "in slots"])
def test_a_padded_batch_is_its_documents_each_run_alone(multiple_of):
    layer = build().double()
    randomise_(layer)
    x = torch.randn(4, 2, 24, dtype=torch.float64)
    x[3, 0] = torch.nan
    x.requires_grad_()
    packed, params = pack_rows(x, MASK, multiple_of=multiple_of)
    out, _ = layer(packed, None, packed_seq_params=params)
    out = unpack_rows(out, MASK, multiple_of=multiple_of)
    weight = torch.randn_like(out)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    actual = torch.autograd.grad((out * weight).sum(), [x, *parameters])
    assert (out[3, 0] == 0).all() and (actual[0][3, 0] == 0).all()

    summed = [torch.zeros_like(parameter) for parameter in parameters]
    for row, span in DOCUMENTS:
        alone = x.detach()[span, row : row + 1].requires_grad_()
        expected, _ = layer(alone, None)
        loss = (expected * weight[span, row : row + 1]).sum()
        grads = torch.autograd.grad(loss, [alone, *parameters])
        assert_close("output", out[span, row], expected[:, 0], TOLERANCE)
        assert_close("gradient of the input", actual[0][span, row], grads[0][:, 0], TOLERANCE)
        for total, grad in zip(summed, grads[1:], strict=True):
            total += grad
    for name, grad, expected in zip(names, actual[1:], summed, strict=True):
        assert_close(f"gradient of {name}", grad, expected, TOLERANCE)


def test_the_refusal_of_a_padded_mask_names_the_way_to_run_it():
    with pytest.raises(NotImplementedError, match=r"megatron_gdn\.pack_rows.*unpack_rows"):
        build()(torch.randn(4, 2, 24), MASK)
