"""Inputs and comparisons shared by the kernel tests."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gdn.ops.delta_rule.base import HeadSizes
from tests.ops.delta_rule.states import documents_of

# Rounding of fp32 in sums of a few hundred terms, and Triton's exp2 / rsqrt, good to
# about 2 ulp: 2^-24 * sqrt(400) * a few operations.
FP32 = 1e-5

DEFAULT_SIZES = HeadSizes(2, 4, 16, 8)


class Case:
    """One layer's parameters and a projection with strided rows, in fp32."""

    def __init__(
        self,
        device,
        *,
        S,
        B=1,
        sizes=DEFAULT_SIZES,
        taps=4,
        bias=False,
        lengths=None,
        dtype=torch.float32,
        seed=0,
    ):
        make = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make).to(device)

        self.sizes = sizes
        self.device = device
        self.dtype = dtype
        # Rows wider than P and batches apart: no kernel may assume either stride.
        self.proj = normal(S, B + 1, sizes.layout.width + 8).to(dtype)[
            :, :B, : sizes.layout.width
        ]
        self.conv_weight = (normal(sizes.layout.conv_width, 1, taps) * taps**-0.5).to(
            dtype
        )
        self.conv_bias = normal(sizes.layout.conv_width).to(dtype) if bias else None
        self.A_log = normal(sizes.value_heads)
        self.dt_bias = normal(sizes.value_heads)
        self.gamma = 1 + 0.3 * normal(sizes.value_dim)
        self.documents = documents_of(lengths, device)
        self._normal = normal

    def grads(self, per_value_head: bool) -> tuple[Tensor, ...]:
        S, B = self.proj.shape[:2]
        G, H, K, V = self.sizes
        shapes = [(H if per_value_head else G, K)] * 2 + [(H, V), (H,), (H,)]
        return tuple(self._normal(B, S, *shape) for shape in shapes)

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self.conv_weight, self.conv_bias, self.A_log, self.dt_bias

    def double(self) -> Case:
        twin = object.__new__(Case)
        twin.__dict__.update(self.__dict__)
        for name in ("proj", "conv_weight", "conv_bias", "A_log", "dt_bias", "gamma"):
            x = getattr(self, name)
            setattr(twin, name, None if x is None else x.double())
        return twin


def assert_close(
    name: str, got: Tensor, exact: Tensor, tolerance: float = FP32
) -> None:
    """Relative error over the whole tensor; NaN never passes."""
    got = got.double()
    exact = exact.double()
    assert got.shape == exact.shape, (
        f"{name}: {tuple(got.shape)} is not {tuple(exact.shape)}"
    )
    scale = exact.norm().clamp_min(1e-30)
    error = ((got - exact).norm() / scale).item() if exact.numel() else 0.0
    assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
