"""fla's and cuDNN's kernels of KDA on a GPU against fp64. Operands are bf16: some four independent
roundings of 2^-9 stay below 2^-7, twice that in the gradient of g, a difference of sums."""

import pytest
import torch

from megatron_gdn.kda.rule import choose_kda
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.ops.delta_rule.states import beside_fp64, documents_of, root_mean_square_errors

pytestmark = pytest.mark.gpu
G, H, K, V = 32, 32, 128, 128
LENGTHS = (1, 63, 64, 0, 65, 130)
GATES = {
    "still": (lambda u: -1e-6 * u, None),
    "slow": (lambda u: -1e-3 * u, None),
    "usual": (lambda u: -(u**4), None),
    "bounded": (lambda u: -5 * u, -5.0),
    "fast": (lambda u: -5 - 0 * u, None),
    "faster": (lambda u: -20 * u, None),
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("rows", [1, 2], ids=["documents", "rows"])
@pytest.mark.parametrize("backend", ["cudnn", "fla"])
def test_kernels_give_what_fp64_gives(backend, rows, gates):
    if backend == "cudnn":
        pytest.importorskip("cudnn")
        if gates == "faster":
            pytest.skip("refused: cuDNN returns NaN")
    torch.manual_seed(0)
    packed = rows == 1
    tokens = sum(LENGTHS) if packed else 4096 if gates == "still" else 200
    log_decay, bound = GATES[gates]
    shape, kind = (rows, tokens, H), {"device": "cuda"}
    inputs = RuleInputs(
        *(l2norm(torch.randn(rows, tokens, G, K, **kind)).bfloat16() for _ in "qk"),
        torch.randn(*shape, V, **kind).bfloat16(),
        log_decay(torch.rand(*shape, K, **kind)),
        torch.rand(*shape, **kind),
    )
    d_o = torch.randn(*shape, V, **kind).bfloat16()
    documents = documents_of(LENGTHS, "cuda") if packed else None
    count = len([n for n in LENGTHS if n]) if packed else rows
    initial, d_final = torch.randn(2, count, H, K, V, **kind)
    given = bound if backend == "fla" else -5.0
    rule = choose_kda(backend, StateShape(H, K, V), given, initial.device, torch.bfloat16).rule
    both = beside_fp64(rule, PlainRule(), inputs, d_o, documents, initial, d_final)
    errors = root_mean_square_errors(*both)
    print(gates, {name: f"{error:.1e}" for name, error in errors.items()})
    bounds = {name: 2**-6 if name == "g" else 2**-7 for name in errors}
    assert all(errors[name] < bounds[name] for name in errors), errors


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_the_layer_in_bf16_is_as_close_to_fp64_as_plain_torch(kernels):
    from megatron_gdn.kda.front import kda_parts
    from megatron_gdn.kda.sizes import rows_of
    from megatron_gdn.ops.mixer import mix
    from megatron_gdn.ops.parts import GatedNorm, Neighbours

    torch.manual_seed(0)
    layout, documents = rows_of(2, 4, K, V), documents_of((200, 1, 63, 36), "cuda")
    tensors = [
        torch.randn(300, 1, layout.width, device="cuda").bfloat16(),
        (torch.randn(layout.conv_width, 1, 4, device="cuda") * 0.5).bfloat16(),
        torch.rand(4, device="cuda"),
        torch.randn(4 * K, device="cuda") - 2,
        (1 + 0.3 * torch.randn(V, device="cuda")).bfloat16(),
    ]
    weight = torch.randn(300, 1, 4 * V, device="cuda").bfloat16()
    state, device = StateShape(4, K, V), torch.device("cuda")
    fla = choose_kda("fla", state, None, device, torch.bfloat16).rule

    def made(dtype, rule, kernels):
        wide = torch.promote_types(dtype, torch.float32)
        dtypes = (dtype, dtype, wide, wide, dtype)
        leaves = [
            x.to(kind, copy=True).requires_grad_() for x, kind in zip(tensors, dtypes, strict=True)
        ]
        rows, conv, A_log, dt_bias, gamma = leaves
        parts = kda_parts(
            rows, conv, None, A_log, dt_bias, layout, rule=rule, kernels=kernels,
            norm=GatedNorm(gamma, 1e-6, False, "sigmoid"),
        )  # fmt: skip
        out = mix(rows, parts, Neighbours(documents))
        (out * weight.to(dtype)).sum().backward()
        return [out, *(x.grad for x in leaves)]

    exact = made(torch.float64, PlainRule(), "torch")
    plain = made(torch.bfloat16, PlainRule(), "torch")
    found = made(torch.bfloat16, fla, kernels)

    def error(got, true):
        return ((got.double() - true).square().mean() / true.square().mean()).sqrt().item()

    names = ("out", "rows", "conv", "A_log", "dt_bias", "gamma")
    errors = {
        name: (error(a, c), error(b, c))
        for name, a, b, c in zip(names, found, plain, exact, strict=True)
    }
    print(kernels, {name: tuple(f"{x:.1e}" for x in both) for name, both in errors.items()})
    # A product of rounded operands in place of fp32 ones: two roundings more, on each of two sides.
    assert all(ours < 2 * plain + 2**-7 for ours, plain in errors.values()), errors
