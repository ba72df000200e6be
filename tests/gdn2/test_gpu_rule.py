"""fla's kernels of Gated DeltaNet-2 on a GPU against fp64. Operands are bf16: some four independent
roundings of 2^-9 stay below 2^-7, twice that in the gradient of g, a difference of sums."""

import pytest
import torch

from megatron_gdn.gdn2.front import gdn2_parts
from megatron_gdn.gdn2.rule import GDN2Inputs, PlainGDN2, choose_gdn2
from megatron_gdn.gdn2.sizes import rows_of
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.parts import GatedNorm, Neighbours
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.ops.delta_rule.states import beside_fp64, documents_of, root_mean_square_errors

pytestmark = pytest.mark.gpu
K, V = 128, 128
LENGTHS = (1, 63, 64, 0, 65, 130)
GATES = {
    "still": lambda u: -1e-6 * u,
    "slow": lambda u: -1e-3 * u,
    "usual": lambda u: -(u**4),
    "fast": lambda u: -5 - 0 * u,
    "faster": lambda u: -20 * u,
}


def fla(heads: int):
    state, device = StateShape(heads, K, V), torch.device("cuda")
    return choose_gdn2("fla", state, device, torch.bfloat16).rule


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("rows", [1, 2], ids=["documents", "rows"])
@pytest.mark.parametrize("key_heads", [16, 8], ids=["own keys", "shared keys"])
def test_kernels_give_what_fp64_gives(key_heads, rows, gates):
    torch.manual_seed(0)
    packed, G, H = rows == 1, key_heads, 16
    tokens = sum(LENGTHS) if packed else 4096 if gates == "still" else 200
    kind = {"device": "cuda"}

    def draw(make, heads, width):
        return make(rows, tokens, heads, width, **kind)

    inputs = GDN2Inputs(
        *(l2norm(draw(torch.randn, G, K)).bfloat16() for _ in "qk"),
        draw(torch.randn, H, V).bfloat16(),
        GATES[gates](draw(torch.rand, G, K)),
        draw(torch.rand, G, K).bfloat16(),
        draw(torch.rand, H, V).bfloat16(),
    )
    d_o = draw(torch.randn, H, V).bfloat16()
    documents = documents_of(LENGTHS, "cuda") if packed else None
    count = len([n for n in LENGTHS if n]) if packed else rows
    initial, d_final = torch.randn(2, count, H, K, V, **kind)
    both = beside_fp64(fla(H), PlainGDN2(), inputs, d_o, documents, initial, d_final)
    errors = root_mean_square_errors(*both)
    print(gates, {name: f"{error:.1e}" for name, error in errors.items()})
    bounds = {name: 2**-6 if name == "g" else 2**-7 for name in errors}
    assert all(errors[name] < bounds[name] for name in errors), errors


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_the_layer_in_bf16_is_as_close_to_fp64_as_plain_torch(kernels):
    torch.manual_seed(0)
    G, H = 2, 4
    layout, documents = rows_of(G, H, K, V), documents_of((200, 1, 63, 36), "cuda")
    tensors = [
        torch.randn(300, 1, layout.width, device="cuda").bfloat16(),
        (torch.randn(layout.conv_width, 1, 4, device="cuda") * 0.5).bfloat16(),
        torch.rand(G, device="cuda"),
        torch.randn(G * K, device="cuda") - 2,
        (1 + 0.3 * torch.randn(V, device="cuda")).bfloat16(),
    ]
    weight = torch.randn(300, 1, H * V, device="cuda").bfloat16()

    def made(dtype, rule, kernels):
        wide = torch.promote_types(dtype, torch.float32)
        dtypes = (dtype, dtype, wide, wide, dtype)
        leaves = [
            x.to(kind, copy=True).requires_grad_() for x, kind in zip(tensors, dtypes, strict=True)
        ]
        rows, conv, A_log, dt_bias, gamma = leaves
        parts = gdn2_parts(
            rows, conv, None, A_log, dt_bias, layout, rule=rule, kernels=kernels,
            norm=GatedNorm(gamma),
        )  # fmt: skip
        out = mix(rows, parts, Neighbours(documents))
        (out * weight.to(dtype)).sum().backward()
        return [out, *(x.grad for x in leaves)]

    exact = made(torch.float64, PlainGDN2(), "torch")
    plain = made(torch.bfloat16, PlainGDN2(), "torch")
    found = made(torch.bfloat16, fla(H), kernels)

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
