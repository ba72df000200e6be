"""Elementwise Triton functions that several kernels call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..elementwise import largest_A_log, least_log_decay

# The fp32 limits of A_log and of log-decays; :mod:`..elementwise` explains both limits.
LARGEST_A_LOG = tl.constexpr(largest_A_log(torch.float32))
LEAST_LOG_DECAY = tl.constexpr(least_log_decay(torch.float32))
# Whether PTX can run. Triton's interpreter, which Triton chooses at import, cannot run
# PTX.
_CAN_RUN_PTX = tl.constexpr(not triton.knobs.runtime.interpret)
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in fp32, to about 3 ulp; 0 or 1 for very large abs(x), NaN only
    for NaN.

    This sigmoid takes four instructions. Triton's own exp and division would take ten.
    """
    if _CAN_RUN_PTX:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * _MINUS_LOG2_E],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [1.0 + e],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def gate_activation(z, sig, SIGMOID: tl.constexpr):
    """The activation of a gate z, sigmoid(z) if SIGMOID, else silu(z); ``sig`` is
    sigmoid(z)."""
    y = sig
    if not SIGMOID:
        y = z * sig
    return y


@triton.jit
def gate_activation_slope(act, sig, SIGMOID: tl.constexpr):
    """The derivative of ``act = gate_activation(z, sig, SIGMOID)`` with respect to z;
    ``sig`` is sigmoid(z)."""
    slope = sig * (1.0 - sig)
    if not SIGMOID:
        slope = sig + act * (1.0 - sig)
    return slope


@triton.jit
def minus_rate(A_log):
    """-exp(A_log), the factor of a head's log-decay; finite unless A_log is NaN."""
    # tl.where keeps a NaN; tl.minimum would replace the NaN by the limit.
    return -tl.exp(tl.where(A_log > LARGEST_A_LOG, LARGEST_A_LOG, A_log))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in fp32, with full relative precision for tiny results."""
    # log(1 + e) loses the digits of a small e. The series e - e^2/2 + e^3/3 ... keeps
    # the digits.
    e = tl.exp(-tl.abs(x))
    series = e * (1 - e * (0.5 - e * (1 / 3 - e * (0.25 - e * (0.2 - e * (1 / 6))))))
    return tl.maximum(x, 0.0) + tl.where(e < 0.0625, series, tl.log(1.0 + e))
