"""Boundaries that are written between a forward and its backward are refused there, and
boundaries that stay, or change between one step and the next, are not."""

from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.enums import AttnMaskType

from megatron_gdn import (
    set_documents,
    static_packed_seq_params,
    tree_packed_seq_params,
)
from megatron_gdn.mixers import packing
from megatron_gdn.mixers.attention import TorchAttention
from tests.distributed.layer_laws import by_megatron, checkpointed, reentrant, thd
from tests.distributed.mixers import whole
from tests.parallel import alone, assert_close, make_config

pytestmark = pytest.mark.usefixtures("one_rank", "no_checkpoint_left")

TOKENS = 24
FIRST = (0, 8, 24)
SECOND = (0, 13, 24)
FIXED = "set_documents was called"
RECOMPUTED = "boundaries of the documents changed"


@pytest.fixture
def no_checkpoint_left():
    """An error in Megatron's checkpoint leaves its flag set, and layers would then not
    use it."""
    yield
    random._unset_checkpointing()


def build(kind):
    if kind == "attention":
        attention = TorchAttention(
            make_config(attention_dropout=0.0),
            1,
            AttnMaskType.causal,
            "self",
            pg_collection=alone(),
        )
        return lambda x, packed: attention(
            *(x.view(TOKENS, 1, 4, 6),) * 3, None, packed_seq_params=packed
        )
    options = {"recompute": "light"}
    layer = (
        whole("mamba2")
        if kind == "Mamba2"
        else whole("gdn", **({} if kind == "fused layer" else options))
    )
    width = layer.config.hidden_size
    return lambda x, packed: layer(x[..., :width], None, packed_seq_params=packed)[0]


def rows():
    return torch.randn(TOKENS, 1, 24, requires_grad=True)


def ordinary():
    return thd((8, 16))


def in_place(packed, offsets):
    packed.cu_seqlens_q.copy_(torch.tensor(offsets))


def by_new_tensors(packed, offsets):
    packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.tensor(
        offsets, dtype=torch.int32
    )


def fixed():
    packed = static_packed_seq_params(TOKENS, 3, device="cpu")
    set_documents(packed, FIRST)
    return packed


def plain(run, x, packed):
    return run(x, packed)


def offloaded(run, x, packed):
    with torch.autograd.graph.save_on_cpu():  # gives copies back
        return run(x, packed)


def nested(run, x, packed):
    return reentrant(lambda x: 2 * reentrant(run, x, packed), x)


def in_one_block(run, x, packed):
    """Megatron's full recomputation: the checkpoint holds a layer with a checkpoint of
    its own."""
    return by_megatron(lambda x: 2 * reentrant(run, x, packed), x)


def without_output(run, x, packed):
    """A hook runs the layer again, in no node of the checkpoint."""
    checkpoint = random.CheckpointWithoutOutput(fp8=None)
    out = checkpoint.checkpoint(lambda x: run(x, packed), x)
    read = 1 * out
    checkpoint.discard_output_and_register_recompute(read)
    return read


KINDS = pytest.mark.parametrize("kind", ["fused layer", "layer of modules", "Mamba2"])
# take buffers
LAYERS = pytest.mark.parametrize("kind", ["fused layer", "layer of modules"])
CHECKPOINTS = pytest.mark.parametrize(
    "around", [checkpointed, reentrant, by_megatron, without_output]
)
IN_FLIGHT = [checkpointed, reentrant, by_megatron, nested, in_one_block]
ALL = pytest.mark.parametrize(
    "around",
    [plain, offloaded, checkpointed, reentrant, by_megatron, without_output],
)
WRITES = pytest.mark.parametrize("write", [in_place, by_new_tensors])


@LAYERS
@ALL
def test_buffers_that_are_filled_again_before_the_backward(kind, around):
    run = build(kind)
    packed = fixed()
    x = rows()
    out = around(run, x, packed)
    set_documents(packed, SECOND)
    with pytest.raises(RuntimeError, match=FIXED):
        out.sum().backward()


@pytest.mark.each_value
@pytest.mark.parametrize("first_goes_back", ["first", "last"])
@LAYERS
@pytest.mark.parametrize("around", [plain, *IN_FLIGHT])
def test_two_micro_batches_in_flight_over_one_set_of_buffers(
    kind, around, first_goes_back
):
    run = build(kind)
    packed = fixed()
    first = around(run, rows(), packed)
    set_documents(packed, SECOND)
    second = around(run, rows(), packed)
    if first_goes_back == "last":
        second.sum().backward()
    with pytest.raises(RuntimeError, match=FIXED):
        first.sum().backward()
    if first_goes_back == "first":
        second.sum().backward()


@KINDS
@CHECKPOINTS
def test_equal_boundaries_that_the_second_forward_makes_again_are_taken(kind, around):
    """Trees, whose documents no two calls share."""
    run = build(kind)

    def made_inside(x, _):
        return run(x, tree_packed_seq_params((8, 16), (-1, 0), device="cpu"))

    x = rows()
    around(made_inside, x, None).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("make", [fixed, ordinary])
def test_two_micro_batches_in_flight_in_layers_that_run_again_themselves(make):
    layer = whole("gdn")
    packed = make()
    layer.recompute_layer = True
    x = rows()[..., : layer.config.hidden_size]
    first, _ = layer(x, None, packed_seq_params=packed)
    if make is fixed:
        set_documents(packed, SECOND)
    else:
        in_place(packed, SECOND)
    layer(x, None, packed_seq_params=packed)
    with pytest.raises(RuntimeError, match=FIXED if make is fixed else RECOMPUTED):
        first.sum().backward()


@pytest.mark.parametrize(
    "kind", ["fused layer", "layer of modules", "Mamba2", "attention"]
)
@CHECKPOINTS
@WRITES
def test_boundaries_that_change_before_the_recomputation(kind, around, write):
    run = build(kind)
    packed = ordinary()
    x = rows()
    out = around(run, x, packed)
    write(packed, SECOND)
    with pytest.raises(RuntimeError, match=RECOMPUTED):
        out.sum().backward()


@pytest.mark.each_value
@pytest.mark.parametrize("first_goes_back", ["first", "last"])
@KINDS
@pytest.mark.parametrize("around", IN_FLIGHT)
@WRITES
def test_two_micro_batches_in_flight_over_one_packed_seq_params(
    kind, around, write, first_goes_back
):
    run = build(kind)
    packed = ordinary()
    first = around(run, rows(), packed)
    write(packed, SECOND)
    second = around(run, rows(), packed)
    if first_goes_back == "last":
        second.sum().backward()
    with pytest.raises(RuntimeError, match=RECOMPUTED):
        first.sum().backward()


@pytest.mark.parametrize("make", [fixed, ordinary])
@pytest.mark.parametrize("around", IN_FLIGHT)
def test_two_micro_batches_in_flight_whose_boundaries_are_the_same(around, make):
    run = build("fused layer")
    packed = make()
    first = around(run, rows(), packed)
    second = around(run, rows(), packed)
    first.sum().backward()
    second.sum().backward()


@pytest.mark.parametrize("make", [fixed, ordinary])
@pytest.mark.parametrize("around", [reentrant, by_megatron, nested])
def test_one_checkpoint_around_micro_batches_with_boundaries_of_their_own(around, make):
    run = build("fused layer")
    one = make()
    other = make()
    x = rows()
    leaf = x.detach().requires_grad_()
    if make is fixed:
        set_documents(other, SECOND)
    else:
        in_place(other, SECOND)

    def both(x, packed):
        return run(x, packed) + run(x, other)

    around(both, x, one).square().sum().backward()
    factor = 2 if around is nested else 1
    (factor * both(leaf, one)).square().sum().backward()
    assert_close("d_x", x.grad, leaf.grad, 1e-5)


def step(run, around, packed, offsets) -> None:
    """What ``packed`` gives is what new boundaries give; buffers take products of other
    shapes."""
    with torch.no_grad():
        run(rows(), packed)  # an evaluation between
    x = rows()
    around(run, x, packed).square().sum().backward()
    new = ordinary()
    leaf = x.detach().requires_grad_()
    by_new_tensors(new, offsets)
    run(leaf, new).square().sum().backward()
    assert_close("d_x", x.grad, leaf.grad, 1e-5)


@pytest.mark.each_value
@KINDS
@ALL
@WRITES
def test_boundaries_of_the_next_step_are_no_change(kind, around, write):
    run = build(kind)
    packed = ordinary()
    for offsets in (FIRST, SECOND, FIRST):
        write(packed, offsets)
        step(run, around, packed, offsets)


@pytest.mark.each_value
@LAYERS
@ALL
def test_buffers_of_the_next_step_are_no_change(kind, around):
    run = build(kind)
    packed = fixed()
    for offsets in (FIRST, SECOND, FIRST):
        set_documents(packed, offsets)
        step(run, around, packed, offsets)


@CHECKPOINTS
def test_the_same_boundaries_written_again_are_no_change(around):
    run = build("fused layer")
    packed = ordinary()
    x = rows()
    out = around(run, x, packed)
    in_place(packed, FIRST)
    out.sum().backward()
    assert x.grad is not None


def test_what_needs_no_boundaries_again_does_not_look_at_them():
    """Without recomputation an ordinary micro-batch keeps its own."""
    run = build("layer of modules")
    packed = ordinary()
    x = rows()
    expected = x.detach().requires_grad_()
    run(expected, ordinary()).square().sum().backward()
    out = run(x, packed)
    in_place(packed, SECOND)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_no_caller_is_looked_at_where_no_backward_can_follow():
    """In training and in inference mode; a checkpoint's first forward has neither."""
    layer = whole("gdn")
    x = rows()[..., : layer.config.hidden_size]
    with patch.object(packing, "_contexts_of_callers", return_value=()) as walk:
        layer(x, None, packed_seq_params=ordinary())
        with torch.inference_mode():
            layer(x, None, packed_seq_params=ordinary())
        assert not walk.called
        with torch.no_grad():
            layer(x, None, packed_seq_params=ordinary())
        assert walk.called
