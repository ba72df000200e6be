"""fla's and cuDNN's kernels of KDA, GDN-2 and Mamba2 on a GPU against fp64.

Operands are bf16: some four independent roundings of 2^-9 stay below 2^-7, twice that
in the gradient of g, a difference of sums.
"""

from contextlib import contextmanager

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from benchmarks.lib.repeats import check_repeats
from megatron_gdn.gdn.rule import FlaGDN, resolve_rule
from megatron_gdn.gdn2.rule import GDN2Inputs, PlainGDN2, choose_gdn2
from megatron_gdn.gdn2.sizes import gdn2_layout as rows_of_gdn2
from megatron_gdn.inference import gdn2_rows, kda_rows
from megatron_gdn.kda.rule import FlaKDA, choose_kda
from megatron_gdn.kda.sizes import KDARuleSizes
from megatron_gdn.kda.sizes import kda_layout as rows_of_kda
from megatron_gdn.mamba2.rule import PlainSSD, SSDInputs, choose_ssd
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.stages import GatedNorm, SequenceContext
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.mamba2.oracle import random_inputs
from tests.ops.delta_rule.states import (
    beside_fp64,
    documents_of,
    root_mean_square_errors,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
K, V = 128, 128
LENGTHS = (1, 63, 64, 0, 65, 130)
GATES = {
    "still": lambda u: -1e-6 * u,
    "slow": lambda u: -1e-3 * u,
    "usual": lambda u: -(u**4),
    "bounded": lambda u: -5 * u,
    "fast": lambda u: -5 - 0 * u,
    "faster": lambda u: -20 * u,
}


def fla_of_kda(heads, bound=None):
    return choose_kda("fla", StateShape(heads, K, V), bound, CUDA, BF16).rule


def fla_of_gdn2(heads):
    return choose_gdn2("fla", StateShape(heads, K, V), CUDA, BF16).rule


def draw(make, *shape):
    return make(*shape, device="cuda")


def kda(shape, gates, backend):
    """A rule, its plain twin and inputs."""
    H = 32
    bound = -5.0 if gates == "bounded" or backend == "cudnn" else None
    inputs = RuleInputs(
        *(l2norm(draw(torch.randn, *shape, H, K)).bfloat16() for _ in "qk"),
        draw(torch.randn, *shape, H, V).bfloat16(),
        GATES[gates](draw(torch.rand, *shape, H, K)),
        draw(torch.rand, *shape, H),
    )
    return (
        choose_kda(backend, StateShape(H, K, V), bound, CUDA, BF16).rule,
        PlainRule(),
        inputs,
    )


def gdn2(shape, gates, G):
    H = 16
    inputs = GDN2Inputs(
        *(l2norm(draw(torch.randn, *shape, G, K)).bfloat16() for _ in "qk"),
        draw(torch.randn, *shape, H, V).bfloat16(),
        GATES[gates](draw(torch.rand, *shape, G, K)),
        draw(torch.rand, *shape, G, K).bfloat16(),
        draw(torch.rand, *shape, H, V).bfloat16(),
    )
    return fla_of_gdn2(H), PlainGDN2(), inputs


def mamba2(shape, gates):
    rows, tokens = shape
    inputs, _ = random_inputs(tokens, rows, BF16, H=8, G=2, K=K, V=64)
    rule = choose_ssd("fla", StateShape(8, K, 64, diagonal=True), CUDA, BF16).rule
    return rule, PlainSSD(), SSDInputs(*(x.cuda() for x in inputs))


# cuDNN refuses "faster", where it returns NaN.
CASES = [
    *(("fla", kda, gates, "fla") for gates in GATES),
    *(("cuDNN", kda, gates, "cudnn") for gates in GATES if gates != "faster"),
    *(("own keys", gdn2, gates, 16) for gates in GATES if gates != "bounded"),
    *(("shared keys", gdn2, gates, 8) for gates in GATES if gates != "bounded"),
    ("fla", mamba2, "usual"),
]


@pytest.mark.parametrize("rows", [1, 2], ids=["documents", "rows"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[1].__name__}-{case[0]}-{case[2]}"
)
def test_kernels_give_what_fp64_gives(case, rows):
    how, make, gates, *options = case
    if how == "cuDNN":
        pytest.importorskip("cudnn")
    torch.manual_seed(0)
    packed = rows == 1
    tokens = sum(LENGTHS) if packed else 4096 if gates == "still" else 200
    rule, plain, inputs = make((rows, tokens), gates, *options)
    values = inputs.x if make is mamba2 else inputs.v
    d_o = torch.randn_like(values)
    documents = documents_of(LENGTHS, "cuda") if packed else None
    count = len([n for n in LENGTHS if n]) if packed else rows
    heads, wide = values.shape[2:]
    initial, d_final = draw(torch.randn, 2, count, heads, K, wide)
    both = beside_fp64(rule, plain, inputs, d_o, documents, initial, d_final)
    errors = root_mean_square_errors(*both)
    print(gates, {name: f"{error:.1e}" for name, error in errors.items()})
    bounds = {
        name: 2**-6 if name == "g" and make is not mamba2 else 2**-7 for name in errors
    }
    assert all(errors[name] < bounds[name] for name in errors), errors


def deterministic(mixer, tokens):
    """fla's rule in deterministic mode, and inputs of one row."""
    torch.manual_seed(0)
    how = Bits.DETERMINISTIC
    if mixer == "gdn":
        sizes = HeadSizes(16, 32, K, V)
        rule = resolve_rule("fla", device=CUDA, dtype=BF16, sizes=sizes, bits=how).rule
        keys = (l2norm(draw(torch.randn, 1, tokens, 16, K)).bfloat16() for _ in "qk")
        values = draw(torch.randn, 1, tokens, 32, V).bfloat16()
        gates = draw(torch.rand, 2, 1, tokens, 32)
        return rule, RuleInputs(*keys, values, -gates[0], gates[1])
    if mixer == "mamba2":
        inputs = mamba2((1, tokens), "usual")[2]
        state = StateShape(8, K, 64, diagonal=True)
        return choose_ssd("fla", state, CUDA, BF16, how).rule, inputs
    if mixer == "gdn2":
        _, _, inputs = gdn2((1, tokens), "usual", 8)
        return choose_gdn2("fla", StateShape(16, K, V), CUDA, BF16, how).rule, inputs
    bound = -5.0 if mixer == "kda, bounded" else None
    _, _, inputs = kda((1, tokens), "bounded" if bound else "usual", "fla")
    return choose_kda("fla", StateShape(32, K, V), bound, CUDA, BF16, how).rule, inputs


def run_once(rule, inputs, d_o, lengths):
    """The output, the final states, the states' gradient and each input's gradient."""
    documents = documents_of(lengths, "cuda")
    states = torch.ones(len(lengths), *d_o.shape[2:3], K, d_o.shape[3], device="cuda")
    out = rule.begin(inputs, documents).run(states, final=True)
    maps = rule.begin(inputs, documents).state_map()
    backward = rule.begin_backward(d_o, inputs, out.saved, documents)
    d_initial = backward.d_initial()
    grads = backward.run(states, states)
    named = {
        "o": out.o,
        "final": out.final_states,
        "local": maps.local,
        "start": d_initial,
    }
    return named | {n: x for n, x in grads._asdict().items() if x is not None}


@pytest.mark.parametrize("mixer", ["gdn", "gdn2", "kda", "kda, bounded", "mamba2"])
def test_in_deterministic_mode_bits_repeat_and_nothing_is_timed(mixer, monkeypatch):
    def timed(kernel, *_, **__):
        raise AssertionError(f"{kernel.base_fn.__name__} was timed")

    monkeypatch.setattr(Autotuner, "_bench", timed)
    lengths = (300, 64, 1, 700, 1000)
    rule, inputs = deterministic(mixer, sum(lengths))
    assert rule.repeats(CUDA, BF16, sizes_of(rule, inputs)).repeated, (
        "an untested machine"
    )
    values = inputs.x if mixer == "mamba2" else inputs.v
    d_o = torch.randn_like(values)
    with torch.no_grad(), torch_is_deterministic():
        report = check_repeats(lambda: run_once(rule, inputs, d_o, lengths), 100)
        assert report.equal, report

        # the first document alone
        alone = type(inputs)(*(x[:, :300] for x in inputs))
        first = run_once(rule, alone, d_o[:, :300].contiguous(), lengths[:1])
        beside = run_once(rule, inputs, d_o, lengths)
    for name, x in first.items():
        if name in ("final", "local", "start"):
            assert torch.equal(beside[name][:1], x), name
        elif name != "D":  # a sum over all documents
            assert torch.equal(beside[name][:, :300], x), name


def sizes_of(rule, inputs):
    """What the rule's class is asked with."""
    state = StateShape(inputs.v.shape[2], K, inputs.v.shape[3])
    if isinstance(rule, FlaKDA):
        return KDARuleSizes(state, None)
    if isinstance(rule, FlaGDN):
        return HeadSizes(16, 32, K, V)
    return state


@contextmanager
def torch_is_deterministic():
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


G, H = 2, 4
SILU = (1e-6, False, "silu")
SIGMOID = (1e-6, False, "sigmoid")
# Rows, rules, heads of the gates, stages and norm of a layer.
LAYERS = {
    "kda": (rows_of_kda, fla_of_kda, PlainRule, H, kda_rows, SIGMOID),
    "gdn2": (rows_of_gdn2, fla_of_gdn2, PlainGDN2, G, gdn2_rows, SILU),
}


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("mixer", LAYERS)
def test_the_layer_in_bf16_is_as_close_to_fp64_as_plain_torch(mixer, kernels):
    rows_of, fla_of, plain_rule, gated, stages_of, norm = LAYERS[mixer]
    torch.manual_seed(0)
    layout = rows_of(HeadSizes(G, H, K, V))
    documents = documents_of((200, 1, 63, 36), "cuda")
    tensors = {
        "rows": draw(torch.randn, 300, 1, layout.width).bfloat16(),
        "conv": (draw(torch.randn, layout.conv_width, 1, 4) * 0.5).bfloat16(),
        "A_log": draw(torch.rand, gated),
        "dt_bias": draw(torch.randn, gated * K) - 2,
        "gamma": (1 + 0.3 * draw(torch.randn, V)).bfloat16(),
    }
    weight = draw(torch.randn, 300, 1, H * V).bfloat16()

    def made(dtype, rule, kernels):
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: x.to(dtype if x.dtype == BF16 else wide, copy=True).requires_grad_()
            for name, x in tensors.items()
        }
        rows, conv, A_log, dt_bias, gamma = leaves.values()
        stages = stages_of(
            rows,
            conv,
            None,
            A_log,
            dt_bias,
            layout,
            rule=rule,
            kernels=kernels,
            norm=GatedNorm(gamma, *norm),
        )
        out = mix(rows, stages, SequenceContext(documents))
        (out * weight.to(dtype)).sum().backward()
        return {"out": out, **{name: x.grad for name, x in leaves.items()}}

    exact = made(torch.float64, plain_rule(), "torch")
    plain = root_mean_square_errors(made(BF16, plain_rule(), "torch"), exact)
    found = root_mean_square_errors(made(BF16, fla_of(H), kernels), exact)
    print(kernels, {name: f"{found[name]:.1e} {plain[name]:.1e}" for name in exact})
    # A product of rounded operands in place of fp32 ones: two roundings more, on each
    # of two sides.
    assert all(found[name] < 2 * plain[name] + 2**-7 for name in exact), (found, plain)
