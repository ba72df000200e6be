"""The inverse by blocks against substitution in fp64."""

import pytest
import torch

from megatron_gdn.ops.delta_rule import triangular

EPS = torch.finfo(torch.float32).eps
WAYS = {
    "whole": triangular.unit_lower_inverse,
    "growing blocks": triangular._by_growing_blocks,
    "substitution": triangular._by_substitution,
}


def random_lower(C, scale):
    torch.manual_seed(C)
    return (torch.randn(3, 2, C, C, dtype=torch.float64) * scale).tril(-1)


def repeated_key(C, beta):
    """What C tokens with one and the same key and no decay make of L."""
    return (beta * torch.ones(1, C, C, dtype=torch.float64)).tril(-1)


def exact_inverse(L):
    identity = torch.eye(L.shape[-1], dtype=L.dtype).expand(L.shape)
    return torch.linalg.solve_triangular(L, identity, upper=False, unitriangular=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("C", [1, 2, 3, 7, 16, 20, 33, 64, 100])
def test_the_inverse_is_exact_in_fp64(way, C):
    L = random_lower(C, 0.2)
    expected = exact_inverse(L)
    actual = WAYS[way](L)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("L", [repeated_key(64, 1.0), repeated_key(64, 0.5), repeated_key(64, 1.9)])
def test_a_key_that_repeats_costs_no_digits(way, L):
    """The bound |X - X'| <= c u |X| |I + L| |X| entry by entry; c counts roundings in a row, C in
    each of log2(C) = 6 levels."""
    exact = exact_inverse(L)
    error = (WAYS[way](L.float()).double() - exact).abs()
    identity = torch.eye(64, dtype=torch.float64)
    bound = 64 * 6 * EPS / 2 * (exact.abs() @ (identity + L).abs() @ exact.abs())
    assert (error <= bound + 1e-30).all(), (error / bound).max()


def test_powers_of_l_would_cost_all_digits():
    """Why the inverse is not (I - L)(I + L^2)(I + L^4)...: the law above can fail."""
    L = repeated_key(64, 0.5)
    inverse, power = torch.eye(64) - L.float(), L.float() @ L.float()
    for _ in range(5):
        inverse, power = inverse @ (torch.eye(64) + power), power @ power
    assert not torch.allclose(inverse.double(), exact_inverse(L), atol=1e-3)
