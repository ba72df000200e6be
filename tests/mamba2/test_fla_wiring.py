"""The rule of fla around stand-ins of its kernels in plain torch: what goes where, on a CPU."""

from collections import defaultdict

import pytest
import torch

from megatron_gdn.mamba2 import fla as fla_rule
from megatron_gdn.mamba2.fla import FlaSSD
from megatron_gdn.mamba2.plain import PlainSSD, SSDInputs
from megatron_gdn.mamba2.rule import choose_ssd
from megatron_gdn.ops.rules import fla
from megatron_gdn.ops.rules.base import Bits, Saved
from megatron_gdn.ops.rules.fla import why_not_callable
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.gdn.stand_ins import OfFla

from .oracle import H, K, V, documents_of, oracle, random_inputs

pytest.importorskip("fla.ops.simple_gla.chunk")
UNEQUAL = (1, 63, 64, 0, 65, 130)


class StandIn(OfFla):
    """fla's functions by the plain rule; the summed g is one too large, to see it passed on."""

    _rule = FlaSSD
    _narrow = False  # whether the backward wants its states in the operands' dtype

    def _check(self, given):
        assert given["chunk_size"] == 64
        assert all(t.is_contiguous() for t in given.values() if isinstance(t, torch.Tensor))

    def chunk_local_cumsum(self, g, scale=None, reverse=False, **_):
        assert reverse == (scale is None)
        return g if reverse else g + 1

    def _inputs(self, q, k, v, g):
        dt = torch.ones_like(g)
        return SSDInputs(v, k, q, dt, g - 1, torch.zeros_like(g)[..., None])

    def _documents(self, cu_seqlens):
        return None if cu_seqlens is None else documents_of(cu_seqlens.diff().tolist())

    def chunk_fwd_h(self, k, v, g, h0, output_final_state, states_in_fp32=None,
                    cu_seqlens=None, **_):  # fmt: skip
        """In place of the states inside, the one before them."""
        if not output_final_state:
            return h0, None
        begun = PlainSSD().begin(self._inputs(k, k, v, g), self._documents(cu_seqlens))
        return h0, begun.run(h0, final=True).final

    @property
    def chunk_fwd_kernel_o(self):
        """In place of the kernel that is launched here; h is the state before."""
        return defaultdict(lambda: self._output)

    def _output(self, q, k, v, h, g, o, cu_seqlens, scale, BT, **_):
        assert scale == 1.0 and BT == 64
        begun = PlainSSD().begin(self._inputs(q, k, v, g), self._documents(cu_seqlens))
        o.copy_(begun.run(h).o)

    def chunk_bwd_dh(self, q, k, v, do, h0, dht, scale, g, states_in_fp32=None, cu_seqlens=None,
                     **_):  # fmt: skip
        """In place of the gradients of the states inside, the one after them."""
        assert scale == 1.0
        if states_in_fp32 is not None:
            assert states_in_fp32 is not self._narrow
            return dht, None
        assert dht is None
        inputs, documents = self._inputs(q, k, v, g), self._documents(cu_seqlens)
        d_local = PlainSSD().begin_backward(do, inputs, Saved(), documents).d_initial()
        assert d_local.shape == h0.shape
        return None, d_local

    def _backward(self, q, k, v, g, do, h, dh, scale, cu_seqlens):
        assert scale == 1.0
        inputs, documents = self._inputs(q, k, v, g), self._documents(cu_seqlens)
        return PlainSSD().begin_backward(do, inputs, Saved(), documents).run(h, dh)

    def chunk_bwd_dqkwg(self, q, k, v, do, h, dh, g, scale, cu_seqlens=None, **_):
        d = self._backward(q, k, v, g, do, h, dh, scale, cu_seqlens)
        return d.C, d.B, None, d.g

    def chunk_bwd_dv(self, q, k, do, dh, g, scale, cu_seqlens=None, **_):
        # Neither v nor the state before has a part in it.
        return self._backward(q, k, do, g, do, None, dh, scale, cu_seqlens).x


@pytest.fixture
def rule():
    rule = FlaSSD()
    rule.fla = StandIn()
    return rule


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("per_channel_D", [False, True], ids=["D of heads", "D of channels"])
@pytest.mark.parametrize("narrow", [False, True], ids=["", "states in bf16"])
def test_dt_skip_groups_and_states_go_where_they_belong(
    rule, packed, per_channel_D, narrow, monkeypatch
):
    lengths = UNEQUAL if packed else (70, 70)
    inputs, d_o = random_inputs(
        sum(lengths) if packed else 70, 1 if packed else 2, torch.float32, per_channel_D
    )
    documents = documents_of(lengths) if packed else None
    count = len([n for n in lengths if n])
    initial, d_final = torch.randn(2, count, H, K, V, dtype=torch.float64)
    monkeypatch.setattr(fla_rule, "fla_needs_tilelang", lambda device: narrow)
    monkeypatch.setattr(StandIn, "_narrow", narrow)
    for first, last in ((None, None), (initial, d_final)):
        o, final, expected, d_initial = oracle(inputs, lengths, d_o, first, last)
        begun = rule.begin(inputs, documents)
        maps = begun.state_map()
        got = begun.run(first, final=True)
        kept = SSDInputs(*(t if n in rule.reads_again else None for n, t in
                           inputs._asdict().items()))  # fmt: skip
        backward = rule.begin_backward(d_o, kept, got.saved, documents)
        local = backward.d_initial()
        grads = backward.run(first, last)
        for name, a, b in zip(
            ("o", "final", *SSDInputs._fields), (got.o, got.final, *grads), (o, final, *expected),
            strict=True,
        ):  # fmt: skip
            assert a.shape == b.shape and (a - b).abs().max() <= 1e-5 * b.abs().max(), name
        if first is not None:
            torch.testing.assert_close(maps.apply(initial), final, rtol=1e-5, atol=1e-5)
            through_back = maps.transposed(local).apply(d_final)
            torch.testing.assert_close(through_back, d_initial, rtol=1e-5, atol=1e-5)


def test_states_of_any_strides_reach_the_kernels_dense(rule):
    """fla's kernels take a state's address and no strides; its own entry point copies first."""
    inputs, d_o = random_inputs(70, dtype=torch.float32)
    initial, d_final = torch.randn(2, 1, H, V, K).mT
    assert not initial.is_contiguous()
    o, final, expected, _ = oracle(inputs, (70,), d_o, initial, d_final)
    got = rule.begin(inputs, None).run(initial, final=True)
    grads = rule.begin_backward(d_o, inputs, got.saved, None).run(initial, d_final)
    for a, b in zip((got.o, got.final, *grads), (o, final, *expected), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_the_installed_fla_has_the_functions_that_are_called():
    assert why_not_callable(FlaSSD) is None


def test_fla_is_chosen_on_gpus_only_and_never_deterministic():
    cpu = {"state": StateShape(2, 128, 64), "device": torch.device("cpu"), "dtype": torch.bfloat16}
    assert choose_ssd("auto", **cpu).rule.name == "reference"
    with pytest.raises(ValueError, match="fla runs on a GPU, not on cpu"):
        choose_ssd("fla", **cpu)
    with pytest.raises(ValueError, match="in deterministic mode use 'auto' or 'reference'"):
        choose_ssd("fla", **cpu, bits=Bits.DETERMINISTIC)
    with pytest.raises(ValueError, match="unknown backend 'mamba_ssm' of Mamba2; use 'auto'"):
        choose_ssd("mamba_ssm", **cpu)


@pytest.mark.parametrize(("rows", "columns", "said"), [(65, 32, "state dim, not 65"),
                                                       (64, 33, "head dim, not 33")])  # fmt: skip
def test_odd_sizes_go_to_the_reference(monkeypatch, rows, columns, said):
    """fla's kernel of dv refuses them in the backward, in 16 bits."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fla, "fla_package", lambda major: None)
    where = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    assert choose_ssd("auto", StateShape(2, 64, 32), **where).rule.name == "fla"
    odd = StateShape(2, rows, columns)
    assert choose_ssd("auto", odd, **where).rule.name == "reference"
    with pytest.raises(ValueError, match=f"even {said}"):
        choose_ssd("fla", odd, **where)
