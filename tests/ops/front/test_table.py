"""A front by its table: gates per head and per channel, of key heads and of value heads."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.ops.front import gates
from megatron_gdn.ops.front.plain import PlainFront
from megatron_gdn.ops.front.table import Convolved, FrontTable, Gate
from megatron_gdn.ops.layout import Layout, Section
from megatron_gdn.ops.state_maps.state_map import StateShape

G, H, K, V, W, S, B = 2, 4, 3, 5, 4, 11, 2


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    erase: Tensor
    write: Tensor


# The gates of Gated DeltaNet-2: a decay and an erase gate per key channel, a write gate per value
# channel.
TABLE = FrontTable(
    layout=Layout(
        (
            Section("query", "key", K, conv=True),
            Section("key", "key", K, conv=True),
            Section("value", "value", V, conv=True),
            Section("z", "value", V),
            Section("f", "key", K),
            Section("b", "key", K),
            Section("w", "value", V),
        ),
        (("value", H), ("key", G)),
    ),
    inputs=Inputs,
    state=StateShape(H, K, V),
    convolved=(
        Convolved("query", "q", unit_length=True),
        Convolved("key", "k", unit_length=True),
        Convolved("value", "v"),
    ),
    gates=(
        Gate("f", ("g",), gates.decay, rated=True, channels=True),
        Gate("b", ("erase",), gates.strength, channels=True),
        Gate("w", ("write",), gates.strength, channels=True),
    ),
)


def written_out(proj, weight, bias, A_log, dt_bias) -> Inputs:
    rows, layout = proj.transpose(0, 1), TABLE.layout
    x = rows[..., layout.conv_columns].mT
    x = F.silu(F.conv1d(F.pad(x, (W - 1, 0)), weight, bias, groups=x.shape[1])).mT
    q, k, v = x.split(layout.conv_widths, dim=-1)
    f, b, w = (rows[..., layout.columns(name)] for name in "fbw")
    q, k = (x.unflatten(-1, (G, K)) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = -A_log.exp()[:, None] * F.softplus(f + dt_bias).unflatten(-1, (G, K))
    write = w.sigmoid().unflatten(-1, (H, V))
    return Inputs(q, k, v.unflatten(-1, (H, V)), g, b.sigmoid().unflatten(-1, (G, K)), write)


@pytest.mark.parametrize("apart", [False, True], ids=["in the rows", "apart"])
@pytest.mark.parametrize("per_value_head", [False, True])
def test_a_table_gives_the_equations_and_their_gradients(apart, per_value_head):
    torch.manual_seed(0)
    layout, double = TABLE.layout, {"dtype": torch.float64}
    C, width = layout.conv_width, layout.width
    proj = torch.randn(S, B, width, **double)
    given = [torch.randn(shape, **double) for shape in ((C, 1, W), (C,), (G,), (G * K,))]
    leaves = [x.clone().requires_grad_() for x in (proj, *given)]
    exact = written_out(*leaves)
    grads = Inputs(*(torch.randn_like(x) for x in exact))
    wanted = torch.autograd.grad(exact, leaves, grads)
    if per_value_head:  # gradients of the value heads that a key head serves, to be summed
        halves = [x[:, :, :, None] * torch.tensor([0.25, 0.75], **double)[:, None] for x in grads]
        halves = [x.flatten(2, 3) for x in halves]
        grads = grads._replace(q=halves[0], k=halves[1], g=halves[3], erase=halves[4])

    gated = layout.columns("f").start
    rows, d_rows = proj, torch.full_like(proj, float("nan"))
    table = TABLE
    if apart:
        sections = [x._replace(gates=x.name in "fbw") for x in layout.sections]
        table = FrontTable(**{**vars(TABLE), "layout": Layout(tuple(sections), layout.counts)})
        given.append(proj[..., gated:].contiguous())
        rows, d_rows = proj[..., :gated], d_rows[..., :gated]
    front = PlainFront(table)
    for x, y in zip(front.forward(rows, given, None), exact, strict=True):
        torch.testing.assert_close(x, y)
        assert x.is_contiguous()
    some = front.forward(rows, given, None, ("k", "erase"))
    assert [name for name, x in some._asdict().items() if x is not None] == ["k", "erase"]
    got = front.backward(rows, given, grads, d_rows, None)
    d_rows = torch.cat([d_rows, got[4]], -1) if apart else d_rows
    assert d_rows[..., layout.gate_columns].isnan().all(), "the readout writes the gate's"
    d_rows[..., layout.gate_columns] = 0
    for x, y in zip((d_rows, *got[:4]), wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("function", "numbers"),
    [(gates.decay, (0, 1)), (gates.bounded_decay, (-5, 1)), (gates.time_step, (0.0, 1e30))],
    ids=["decay", "bounded_decay", "time_step"],
)
def test_extreme_columns_and_rates_give_a_decay_and_no_nan(function, numbers):
    x = torch.tensor([[-1e30, 1e30, 0.0]]).T.requires_grad_()
    A_log = torch.tensor([0.0, 0.0, 1e4])[:, None].requires_grad_()
    made = function(x, A_log, *numbers)
    assert made[0].exp()[0].item() == 1 and made[0].exp()[1].item() < 0.01
    sum(y.clamp(max=1).sum() for y in made).backward()
    assert x.grad.isfinite().all() and A_log.grad.isfinite().all()
