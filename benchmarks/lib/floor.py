"""The floor under a layer: its projections alone, its rule alone, and the bytes around
them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.delta_rule.base import HeadSizes

from .layers import DEVICE, Case
from .rules import begin_backward


def floor_ms(
    case: Case,
    module,
    sizes: HeadSizes,
    x: torch.Tensor,
    documents,
    bandwidth: float,
    milliseconds: Callable[[Callable[[], None]], float],
    log_decay: float | None = None,
) -> dict[str, list[float]]:
    """Each part and their sum: ``[forward, forward and backward]`` in milliseconds.

    Args:
        module: our layer.
        bandwidth: bytes per second of a copy, read and written.
        milliseconds: times a call.
        log_decay: of every token; None draws them from -1 to 0. FlashQLA prepares less
            where the decay is fast.
    """
    G, H, K, V = sizes
    mixed = torch.randn(
        case.tokens,
        case.batch,
        H * V,
        device=DEVICE,
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    with torch.no_grad():
        grads = [
            torch.randn_like(f(t)[0])
            for f, t in ((module.in_proj, x), (module.out_proj, mixed))
        ]

    def projections(backward: bool) -> None:
        for index, (f, t) in enumerate(((module.in_proj, x), (module.out_proj, mixed))):
            t.grad = f.weight.grad = None
            out = f(t)[0]
            if backward:
                out.backward(grads[index])

    shape = (case.batch, case.tokens)

    def unit(heads: int, dim: int) -> torch.Tensor:
        x = torch.randn(*shape, heads, dim, device=DEVICE)
        return torch.nn.functional.normalize(x, dim=-1).to(operand)

    operand = module.rule.operand_dtype or torch.bfloat16
    decay = -torch.rand(*shape, H, device=DEVICE)
    inputs = RuleInputs(
        unit(G, K),
        unit(G, K),
        torch.randn(*shape, H, V, device=DEVICE).to(operand),
        decay if log_decay is None else torch.full_like(decay, log_decay),
        torch.rand(*shape, H, device=DEVICE),
    )
    d_o = torch.randn_like(inputs.v, dtype=torch.bfloat16)

    def rule(backward: bool) -> None:
        saved = module.rule.begin(inputs, documents).run().saved
        if backward:
            begin_backward(module.rule, inputs, d_o, saved, documents).run()

    C = sizes.layout.conv_width
    per_token_fwd = 2 * 2 * C + 3 * 2 * H * V + 12 * H
    group = H // G if module.rule.name == "flash_qla" else 1
    per_token_bwd = 2 * (2 * C + 2 * G * group * K + H * V) + 5 * 2 * H * V + 16 * H
    tokens = case.tokens * case.batch
    gemm = [milliseconds(lambda b=b: projections(b)) for b in (False, True)]
    core = [milliseconds(lambda b=b: rule(b)) for b in (False, True)]
    move = [tokens * per_token_fwd / bandwidth * 1e3]
    move.append(move[0] + tokens * per_token_bwd / bandwidth * 1e3)
    return {
        "projections": gemm,
        "rule": core,
        "bytes": move,
        "total": [g + c + m for g, c, m in zip(gemm, core, move, strict=True)],
    }
