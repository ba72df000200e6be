"""The parts of a Mamba2 mixer, from its tensors.

Legend: P projection width, C conv channels, W conv taps, H heads, V head dim.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..conv import Convolve, convolve_rows
from ..front import conv_package
from ..front.conv_package import why_not_conv_package
from ..kernels.obstacles import why_not_triton
from ..layout import Layout
from ..parts import GatedNorm, Parts
from ..readout.base import Apart
from ..readout.choose import grouped
from ..readout.grouped import GateOnly
from ..rules.base import Rule
from .front import Mamba2Front
from .rule.base import UNLIMITED


def mamba2_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | Apart | None,
    dt_limit: tuple[float, float] = UNLIMITED,
    kernels: str = "auto",
    gates: Tensor | None = None,
) -> Parts:
    """The :class:`Parts` of a Mamba2 mixer.

    Args:
        rows: ``[S, B, P]``; their device and dtype choose the kernels.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        D: ``[H]`` or ``[H V]``, fp32.
        layout: rows z | x | B | C | dt.
        rule: from :func:`.rule.resolve.resolve_ssd`.
        norm: gamma ``[H V]`` and eps of the norm over each group, or a readout that calls the norm;
            None: the gate alone.
        dt_limit: least and greatest time step.
        kernels: ``"triton"``, ``"torch"`` or ``"auto"``: Triton where it runs, else causal-conv1d
            for the convolution where that runs, else plain torch.
        gates: dt ``[S, B, H]``, if ``rows`` end before it; not for generation.

    Raises:
        ValueError: rows of other heads; unknown ``kernels``.
    """
    width = layout.width if gates is None else layout.main_width
    if rows.shape[-1] != width:
        raise ValueError(
            f"projection rows of {rows.shape[-1]} columns, but z, x, B, C and dt of these heads "
            f"have {width}: {dict(zip(layout.names, layout.widths, strict=True))}."
        )
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'.")
    triton, convolve = kernels == "triton", convolve_rows
    if kernels == "auto":
        kind = rows.device.type, rows.dtype, conv_weight.shape[-1]
        triton = why_not_triton(*kind) is None
        widths = (sum(layout.conv_widths),)
        aligned = getattr(rule, "aligned", False)
        if not triton and why_not_conv_package(*kind, widths, aligned) is None:
            convolve = conv_package.convolve_rows
    gamma, gate = None, layout.gate_columns
    if norm is None:
        readout = GateOnly(gate)
    elif isinstance(norm, Apart):
        readout = norm
    else:
        gamma, eps, *_ = norm
        readout = grouped(gate, layout.heads("group"), eps, triton)
    front = _front(layout, tuple(dt_limit), triton, rule.batch_invariant, convolve)
    apart = () if gates is None else (gates,)
    return Parts(front, rule, readout, (conv_weight, conv_bias, A_log, dt_bias, D, *apart, gamma))


@lru_cache(maxsize=64)
def _front(
    layout: Layout,
    dt_limit: tuple[float, float],
    triton: bool,
    batch_invariant: bool,
    convolve: Convolve,
) -> Mamba2Front:
    return Mamba2Front(layout, dt_limit, triton, batch_invariant, convolve)
