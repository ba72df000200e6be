"""The kernels that bring gradients to fp16 against their plain-torch twin: equal in
every bit."""

import pytest
import torch

from megatron_gdn.gdn import half_kernels, half_torch

# in lanes that a mask hides
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
SHAPES = {
    "T1": (1, 1, 1, 1, 4),
    "T3-B2": (2, 3, 3, 6, 20),
    "T300-1to3": (1, 300, 1, 3, 24),
    "T700-B2": (2, 700, 2, 4, 40),
    "nothing": (1, 0, 2, 4, 8),
}


def gradients(shape, device, dtype):
    B, S, G, H, V = shape
    make = torch.Generator().manual_seed(S)
    x = (
        torch.randn(B, S, H, V, generator=make)
        * 2.0 ** torch.arange(-40, H - 40)[:, None]
    )
    return (x * torch.randn(B, S, 1, 1, generator=make).exp()).to(dtype).to(device), G


def assert_equal_to_the_twin(x, key_heads):
    got = half_kernels.to_half(x, key_heads, 0)
    twin = half_torch.to_half(x, key_heads, 0)
    for name, a, b in zip(("half", "up", "down"), got, twin, strict=True):
        assert a.dtype == b.dtype and a.is_contiguous()
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    return got


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_bit_equals_the_twins(shape, dtype, device):
    x, G = gradients(shape, device, dtype)
    half, up, down = assert_equal_to_the_twin(x, G)
    assert torch.equal(up * down, torch.ones_like(up))
    if dtype == torch.float32 and x.numel():
        most = half.float().abs().amax((0, 1, 3)).view(G, -1).amax(1)
        assert (most >= 0.5).all() and (most <= 1).all()  # 1: rounded up to it


def test_a_ceiling_holds_for_its_head(device):
    """Of states as large as make the power of the first key head 2^(100 - 127)."""
    x, G = gradients(SHAPES["T700-B2"], device, torch.float32)
    half, up, _ = half_torch.to_half(x, G, 0)
    states = torch.zeros(1, len(up), 3, 5, device=device)
    states[0, 0, 1, 2] = 1.5 * 2.0**26
    for lower in (half_torch.lower_powers, half_kernels.lower_powers):
        limited = lower(half.clone(), up, states, G, 0)[1]
        assert (limited[:2] == 2.0 ** (100 - 127)).all() and torch.equal(
            limited[2:], up[2:]
        )


@pytest.mark.parametrize(
    "bad", [0.0, float("nan"), float("inf"), -float("inf"), 3e38, 1e-45]
)
def test_zero_and_what_is_not_finite_and_the_ends_of_fp32(bad, device):
    x, G = gradients(SHAPES["T3-B2"], device, torch.float32)
    x[:, :, 2:4] = 0 if bad == 0 or abs(bad) < 1 else x[:, :, 2:4]
    x[0, 1, 3, 7] = bad
    half, up, down = assert_equal_to_the_twin(x, G)
    assert up.isfinite().all() and down.isfinite().all()
    assert half[:, :, :2].isfinite().all() and half[:, :, 4:].isfinite().all()
    assert half[0, 1, 3, 7].isfinite() == torch.tensor(bad).isfinite()
    if not torch.tensor(bad).isfinite():
        x[0, 1, 3, 7] = 0
        without, *powers = half_torch.to_half(x, G, 0)
        assert torch.equal(torch.stack(powers), torch.stack([up, down]))
        half[0, 1, 3, 7] = 0
        assert torch.equal(half, without), (
            "other gradients keep their power and their bits"
        )


def test_gradients_that_are_not_contiguous(device):
    x, G = gradients(SHAPES["T3-B2"], device, torch.float32)
    assert_equal_to_the_twin(x.transpose(0, 1), G)


@pytest.mark.each_value
@pytest.mark.parametrize("case", ["usual", "lower one", "far lower", "none", "nan"])
@pytest.mark.parametrize("shape", [SHAPES["T300-1to3"], SHAPES["T700-B2"]], ids=str)
def test_powers_are_lowered_for_states_as_by_the_twin(shape, case, device):
    x, G = gradients(shape, device, torch.float32)
    H, V = x.shape[2:]
    make = torch.Generator().manual_seed(1)
    states = torch.randn(5, H, 7, V, generator=make).to(device) * 1e-20
    states[3, -1, 2, 1] = {
        "lower one": 1e20,
        "far lower": 3e38,
        "nan": float("nan"),
    }.get(case, 0)
    states = states * 0 if case == "none" else states
    half, up, _ = half_torch.to_half(x, G, 0)
    if case == "far lower":
        up *= 2.0**80  # as of gradients that small
    got_half = half.clone()
    twin_half = half.clone()
    got = half_kernels.lower_powers(got_half, up, states, G, 5)
    twin = half_torch.lower_powers(twin_half, up, states, G, 5)
    for name, a, b in zip(
        ("half", "ratio", "up", "down"),
        (got_half, *got),
        (twin_half, *twin),
        strict=True,
    ):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    ratio, new, down = got
    assert torch.equal(new * down, torch.ones_like(new))
    assert (ratio <= 1).all() and (ratio[-1] < 1) == (
        case in ("lower one", "far lower")
    )
    if case == "lower one":
        assert torch.equal(new, up * ratio)
        assert 2**4 <= (states[:, -1] * new[-1]).abs().max() < 2**5
        assert torch.equal(got_half, (half * ratio[:, None]).half())
