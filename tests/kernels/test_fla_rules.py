"""fla's kernels of every mixer in Triton's interpreter against fp64: in fp32, where a
wrong scale, base of the logarithm, boundary or state shows in the last digits."""

import builtins
import operator
import sys

import pytest
import torch

from megatron_gdn.gdn.api import run_rule
from megatron_gdn.gdn.rule import FlaGDN
from megatron_gdn.gdn2.rule import FlaGDN2, GDN2Inputs, PlainGDN2
from megatron_gdn.kda.rule import FlaKDA
from megatron_gdn.mamba2.rule import FlaSSD, PlainSSD
from megatron_gdn.ops.delta_rule import fla as delta_rules
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.rules.base import SavedForBackward
from megatron_gdn.ops.state_maps.segments import cut_at
from megatron_gdn.ops.static_documents import StaticDocuments
from tests.gdn2.oracle import random_inputs as random_inputs_of_gdn2
from tests.mamba2.oracle import random_inputs
from tests.ops.delta_rule.states import (
    NAMES,
    assert_rows_equal_one_row,
    backward_of,
    beside_fp64,
    documents_of,
    run_everything,
    run_in_segments,
    run_whole,
)

from .conftest import INTERPRETED
from .kernel_cases import assert_close

pytest.importorskip("fla.ops.kda.chunk")
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU fla would round fp32 to tf32"),
    # Decays between tokens of the wrong order, which a mask then drops.
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]
H = 2
K = 16
V = 16


@pytest.fixture
def kernels(monkeypatch) -> None:
    """fla's kernels, with what the interpreter cannot do: time them, gather, count in
    tensors."""
    import fla.ops.simple_gla.chunk  # noqa: F401
    import triton.language as tl
    from fla.ops.cp import chunk_fwd
    from fla.ops.gdn2 import chunk_intra as chunk_intra_of_gdn2
    from fla.ops.kda import chunk_intra

    monkeypatch.setattr(chunk_fwd, "_check_cp_device", lambda device: None)
    monkeypatch.setattr(chunk_intra, "IS_GATHER_SUPPORTED", False)
    monkeypatch.setattr(chunk_intra_of_gdn2, "IS_GATHER_SUPPORTED", False)
    monkeypatch.setattr(chunk_intra, "SAFE_GATE_DOT_PRECISION", tl.constexpr("ieee"))

    def tensors(*bounds):
        """``range``, whose numbers have the methods of tensors, as compiled ones
        have."""
        return (
            tl.full((), i, tl.int32)
            for i in builtins.range(*map(operator.index, bounds))
        )

    for name, module in list(sys.modules.items()):
        if not name.startswith("fla.ops"):
            continue
        for kernel in list(vars(module).values()):
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if (
                isinstance(getattr(kernel, "configs", None), list)
                and len(kernel.configs) > 1
            ):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
        if name.endswith(("chunk_delta_h", "common.chunk_h")):
            monkeypatch.setattr(module, "range", tensors, raising=False)


def kda(rows, tokens, bound):
    shape = (rows, tokens, H)
    q, k, v = torch.randn(3, *shape, K)
    g = -(5 if bound else 1) * torch.rand(*shape, K)
    beta = torch.rand(shape)
    return RuleInputs(l2norm(q), l2norm(k), v, g, beta), torch.randn(*shape, V)


def gdn(rows, tokens, G=H):
    shape = (rows, tokens, H)
    q, k = (l2norm(torch.randn(rows, tokens, G, K)) for _ in "qk")
    v, d_o = torch.randn(2, *shape, V)
    return RuleInputs(q, k, v, -0.1 * torch.rand(shape), torch.rand(shape)), d_o


def gdn2(rows, tokens, gates, G=H):
    inputs = GDN2Inputs(
        *(x.float() for x in random_inputs_of_gdn2(gates, rows, tokens, G, H, K, V))
    )
    return inputs, torch.randn(rows, tokens, H, V)


def ssd(rows, tokens, per_channel_D, G):
    return random_inputs(tokens, rows, torch.float32, per_channel_D, G=G, H=H, K=K, V=V)


DOCUMENTS = (1, 64, 0, 65)
CASES = {
    "GDN, rows": (FlaGDN(), PlainRule(), (gdn, 2, 65), None, True),
    "GDN, documents": (FlaGDN(), PlainRule(), (gdn, 1, 130, 1), DOCUMENTS, True),
    "KDA, rows": (FlaKDA(None), PlainRule(), (kda, 2, 65, None), None, True),
    "KDA, documents": (FlaKDA(None), PlainRule(), (kda, 1, 130, None), DOCUMENTS, True),
    "KDA, bounded": (FlaKDA(-5.0), PlainRule(), (kda, 1, 130, -5.0), DOCUMENTS, True),
    "GDN-2, rows": (FlaGDN2(), PlainGDN2(), (gdn2, 2, 65, "usual"), None, True),
    "GDN-2, documents": (
        FlaGDN2(),
        PlainGDN2(),
        (gdn2, 1, 130, "slow", 1),
        DOCUMENTS,
        True,
    ),
    "Mamba2, rows": (FlaSSD(), PlainSSD(), (ssd, 2, 65, False, H), None, False),
    "Mamba2, documents": (
        FlaSSD(),
        PlainSSD(),
        (ssd, 1, 130, True, 1),
        DOCUMENTS,
        True,
    ),
}


# Up to a minute each in the interpreter; other documents of the same rule are held in
# every run.
LONG = ("KDA, rows", "KDA, documents", "GDN-2, rows")


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.nightly] if x in LONG else []) for x in CASES],
)
def test_the_kernels_give_what_the_plain_rule_gives_in_fp64(kernels, case):
    torch.manual_seed(0)
    rule, plain, (draw, *sizes), lengths, with_states = CASES[case]
    inputs, d_o = draw(*sizes)
    documents = None if lengths is None else documents_of(lengths)
    initial, d_final = (
        torch.randn(2, 2 if lengths is None else 3, H, K, V) * with_states
    )
    found, exact = beside_fp64(rule, plain, inputs, d_o, documents, initial, d_final)
    for name, tensor in exact.items():
        assert_close(name, found[name], tensor)
    maps = rule.begin(inputs, documents).state_map()
    assert {x.dtype for x in (found["final"], *maps, found["d_initial"])} == {
        torch.float32
    }


@pytest.mark.parametrize("case", [x for x in CASES if x.endswith("rows")])
def test_of_16_bits_each_result_has_the_dtype_that_the_plain_rule_gives(kernels, case):
    rule, plain, (draw, *sizes), *_ = CASES[case]
    inputs, d_o = draw(1, 3, *sizes[2:])
    rounded = dict.fromkeys(("q", "k", "v", "x", "B", "C"), torch.float16)
    inputs = type(inputs)(
        *(x.to(rounded.get(name, x.dtype)) for name, x in inputs._asdict().items())
    )
    found, expected = (
        run_everything(x, inputs, d_o.half(), None, *torch.zeros(2, 1, H, K, V))
        for x in (rule, plain)
    )
    dtypes = {name: x.dtype for name, x in expected.items()}
    if isinstance(rule, FlaKDA):
        dtypes |= dict.fromkeys("qk", torch.float32)  # fla does not round these
    assert {name: x.dtype for name, x in found.items()} == dtypes


def test_a_map_is_made_of_those_of_the_parts(kernels, monkeypatch):
    monkeypatch.setattr(
        delta_rules, "cut_by_length", lambda these, *_: cut_at(these, [0, 64, 130])
    )
    torch.manual_seed(0)
    inputs, _ = gdn(1, 130, 1)
    wide = RuleInputs(*(x.double() for x in inputs))
    maps, exact = (
        rule.begin(given, None).state_map()
        for rule, given in ((FlaGDN(), inputs), (PlainRule(), wide))
    )
    assert_close("local", maps.local, exact.local)
    assert_close("through", maps.through, exact.through)


def test_rows_second_runs_and_fixed_buffers(kernels):
    """What is the same around the kernels of all mixers: GDN's are the quickest
    here."""
    torch.manual_seed(0)
    rule = FlaGDN()
    inputs, d_o = gdn(1, 130, 1)
    documents = documents_of((64, 0, 66))
    assert_rows_equal_one_row(run_whole, rule, inputs, d_o, documents)
    saved = rule.begin(inputs, documents).run().saved
    assert rule.kept_to_recompute(saved) == SavedForBackward()
    again = rule.recompute(inputs, SavedForBackward(), documents, None).saved
    once, twice = (
        backward_of(rule, inputs, d_o, x, documents).run() for x in (saved, again)
    )
    assert all(torch.equal(a, b) for a, b in zip(once[:5], twice[:5], strict=True))
    wide = RuleInputs(*(x.double() for x in inputs))
    expected = run_whole(PlainRule(), wide, d_o.double())
    static = StaticDocuments(130, 4)
    static.fill(documents.offsets)
    found = run_in_segments(rule, inputs, d_o, static)
    for name, got, exact in zip(NAMES, found, expected, strict=True):
        assert_close(name, got, exact)


def test_the_function_takes_heads_before_tokens(kernels):
    """fla's kernels take an address alone, of each input."""
    torch.manual_seed(0)
    inputs, d_o = gdn(2, 20)

    def by(rule, given):
        leaves = RuleInputs(*(x.requires_grad_() for x in given))
        o, _ = run_rule(rule, leaves, None)
        return o, *torch.autograd.grad(o, leaves, d_o.to(o.dtype))

    expected = by(PlainRule(), [x.double() for x in inputs])
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    for name, got, exact in zip(
        ("o", *NAMES[1:6]), by(FlaGDN(), heads_first), expected, strict=True
    ):
        assert_close(name, got, exact)


def test_the_function_takes_gates_in_bf16(kernels):
    torch.manual_seed(0)
    (q, k, v, *gates), d_o = gdn(1, 70, 1)
    gates = [x.bfloat16() for x in gates]

    def by(*gates):
        leaves = RuleInputs(*(x.clone().requires_grad_() for x in (q, k, v, *gates)))
        o, _ = run_rule(FlaGDN(), leaves, None)
        return o, *torch.autograd.grad(o, leaves, d_o)

    found, expected = by(*gates), by(*(x.float() for x in gates))
    assert [x.dtype for x in found[4:]] == [torch.bfloat16] * 2
    for x, wide in zip(found, expected, strict=True):
        assert torch.equal(x, wide.to(x.dtype))
