"""Rules that no mixer here has are values of the chunk rule: an erase key, a write key, a written
value and a decay of their own. Held to their recurrence in fp64."""

from typing import NamedTuple

import pytest
import torch

from megatron_gdn.ops.delta_rule.chunk_math import Values
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.elementwise import l2norm

from .states import documents_of, run_everything

G, H, K, V = 2, 4, 6, 5
LENGTHS = (1, 63, 0, 66, 130)


class Inputs(NamedTuple):
    q: torch.Tensor  # [B, S, G, K]
    k: torch.Tensor
    v: torch.Tensor  # [B, S, H, V]
    g: torch.Tensor  # [B, S, G or H, K]
    b: torch.Tensor  # [B, S, G, K], what is erased of each key channel
    w: torch.Tensor  # [B, S, H, V], what is written of each value channel


class ErasesAndWritesByChannel(PlainRule):
    """``S_t = (I - k (b * k)^T) Diag(exp(g)) S_{t-1} + k (w * v)^T``: Gated DeltaNet-2."""

    reads_again, grads = frozenset(Inputs._fields), Inputs

    def values(self, q, k, v, g, b, w):
        return Values(q * K**-0.5, k, b * k, w * v, g)


def drawn(rows, tokens, decay, groups=G):
    torch.manual_seed(1)
    shape = {"dtype": torch.float64}
    q, k = (l2norm(x) for x in torch.randn(2, rows, tokens, G, K, **shape))
    v, w = torch.randn(2, rows, tokens, H, V, **shape)
    g, b = (
        -decay * torch.rand(rows, tokens, groups, K, **shape) ** 8,
        torch.rand(rows, tokens, G, K),
    )
    return Inputs(q, k, v, g, b.double(), w.sigmoid()), torch.randn(rows, tokens, H, V, **shape)


def token_by_token(inputs, initial, spans):
    q, k, v, g, b, w = (x.repeat_interleave(H // x.shape[2], 2) for x in inputs)
    o, final = torch.zeros_like(v), []
    for state, (row, start, end) in zip(initial, spans, strict=True):
        for t in range(start, end):
            S, key = g[row, t, :, :, None].exp() * state, k[row, t, :, :, None]
            erased = ((b[row, t] * k[row, t])[..., None] * S).sum(1, keepdim=True)
            state = S + key * ((w * v)[row, t, :, None] - erased)
            o = o.index_put(
                (torch.tensor(row), torch.tensor(t)), (q[row, t, :, :, None] * state).sum(1)
            )
        final.append(state)
    return o * K**-0.5, torch.stack(final)


def exact(inputs, d_o, initial, d_final, spans):
    leaves = [x.detach().requires_grad_() for x in (*inputs, initial)]
    o, final = token_by_token(Inputs(*leaves[:-1]), leaves[-1], spans)
    *grads, d_initial = torch.autograd.grad((o, final), leaves, (d_o, d_final))
    found = {"o": o, "final": final, "final by the map": final, "d_initial": d_initial}
    return {name: x.detach() for name, x in {**found, **Inputs(*grads)._asdict()}.items()}


@pytest.mark.parametrize("groups", [G, H], ids=["decays of key heads", "of value heads"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_an_erase_key_and_a_written_value_are_values_of_the_chunk_rule(packed, groups):
    rows, tokens = (1, sum(LENGTHS)) if packed else (2, 70)
    inputs, d_o = drawn(rows, tokens, 1.0, groups)
    documents = documents_of(LENGTHS) if packed else None
    spans = [(row, 0, tokens) for row in range(rows)]
    if packed:
        spans = [(0, *span) for span in ((0, 1), (1, 64), (64, 130), (130, 260))]
    initial, d_final = torch.randn(2, len(spans), H, K, V, dtype=torch.float64)
    found = run_everything(ErasesAndWritesByChannel(), inputs, d_o, documents, initial, d_final)
    for name, expected in exact(inputs, d_o, initial, d_final, spans).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("decay", [100.0, 1e4])
def test_decays_that_leave_nothing_stay_finite_in_fp32(decay):
    inputs, d_o = drawn(2, 130, decay)
    states = torch.randn(2, 2, H, K, V)
    narrow, d_o = Inputs(*(x.float() for x in inputs)), d_o.float()
    found = run_everything(ErasesAndWritesByChannel(), narrow, d_o, None, *states)
    wide, spans = Inputs(*(x.double() for x in narrow)), [(0, 0, 130), (1, 0, 130)]
    for name, expected in exact(wide, d_o.double(), *states.double(), spans).items():
        assert found[name].isfinite().all(), name
        error = (found[name].double() - expected).norm() / expected.norm().clamp(min=1e-20)
        assert error < 1e-5 or expected.abs().max() < 1e-20, (name, error)


def test_a_token_that_is_not_finite_reaches_no_earlier_output():
    inputs, _ = drawn(1, 70, 1.0)
    o = ErasesAndWritesByChannel().begin(inputs, None).run().o
    for name in ("k", "v", "g", "b", "w"):
        broken = getattr(inputs, name).clone()
        broken[0, 40, 0, 0] = float("nan")
        got = ErasesAndWritesByChannel().begin(inputs._replace(**{name: broken}), None).run().o
        reached = 1 if name in ("v", "w") else H // G  # heads
        assert torch.equal(got[:, :40], o[:, :40]), name
        assert got[:, 40:, :reached].isnan().all(), name
        assert torch.equal(got[:, 40:, reached:], o[:, 40:, reached:]), name
