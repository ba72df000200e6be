"""The floor under a layer: its projections alone, its rule alone, and the bytes around
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.mamba2.rule import SSDInputs
from megatron_gdn.ops.documents import Documents

from .calls import Call
from .layers import DEVICE, Sizes
from .rules import begin_backward


def floor_ms(
    call: Call,
    sizes: Sizes,
    bandwidth: float,
    milliseconds: Callable[[Callable[[], None]], float],
) -> dict[str, list[float]]:
    """Each part and their sum: ``[forward, forward and backward]`` in milliseconds.

    Args:
        call: our layer, Gated DeltaNet or Mamba2.
        bandwidth: bytes per second of a copy, read and written.
        milliseconds: times a call.
    """
    case = call.case
    module = call.module
    _, H, K, V = sizes.of_heads
    mixed = torch.randn(
        case.tokens,
        case.batch,
        H * V,
        device=DEVICE,
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    pairs = ((module.in_proj, call.x), (module.out_proj, mixed))
    with torch.no_grad():
        grads = [torch.randn_like(f(t)[0]) for f, t in pairs]

    def projections(backward: bool) -> None:
        for (f, t), grad in zip(pairs, grads, strict=True):
            t.grad = f.weight.grad = None
            out = f(t)[0]
            if backward:
                out.backward(grad)

    documents = None
    if case.offsets is not None:
        documents = Documents.from_cu_seqlens(case.offsets, case.tokens, device=DEVICE)
    inputs: Any = INPUTS[sizes.mixer](call, sizes)
    d_o = torch.randn(
        case.batch, case.tokens, H, V, device=DEVICE, dtype=torch.bfloat16
    )

    def rule(backward: bool) -> None:
        saved = module.rule.begin(inputs, documents).run().saved
        if backward:
            begin_backward(module.rule, inputs, d_o, saved, documents).run()

    C = module.dims.layout.conv_width
    per_token_fwd = 2 * 2 * C + 3 * 2 * H * V + 12 * H
    per_token_bwd = 2 * 3 * C + 5 * 2 * H * V + 16 * H
    if sizes.mixer == "gdn":
        G = sizes.heads[0]
        group = H // G if module.rule.name == "flash_qla" else 1
        gradients = 2 * G * group * K + H * V
        per_token_bwd = 2 * (2 * C + gradients) + 5 * 2 * H * V + 16 * H
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


def gdn_inputs(call: Call, sizes: Sizes) -> RuleInputs:
    """FlashQLA prepares less where the decay is fast: it is that of the case."""
    G, H, K, V = sizes.of_heads
    shape = (call.case.batch, call.case.tokens)
    operand = call.module.rule.operand_dtype or torch.bfloat16

    def unit(heads: int, dim: int) -> Tensor:
        x = torch.randn(*shape, heads, dim, device=DEVICE)
        return torch.nn.functional.normalize(x, dim=-1).to(operand)

    decay = -torch.rand(*shape, H, device=DEVICE)
    if call.case.gates == "slow":
        decay = torch.full_like(decay, -1 / 4096)
    return RuleInputs(
        unit(G, K),
        unit(G, K),
        torch.randn(*shape, H, V, device=DEVICE).to(operand),
        decay,
        torch.rand(*shape, H, device=DEVICE),
    )


def mamba2_inputs(call: Call, sizes: Sizes) -> SSDInputs:
    G, H, K, V = sizes.of_heads
    shape = (call.case.batch, call.case.tokens)
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    dt = torch.rand(*shape, H, device=DEVICE) * 0.1
    return SSDInputs(
        torch.randn(*shape, H, V, **kind),
        torch.randn(*shape, G, K, **kind),
        torch.randn(*shape, G, K, **kind),
        dt,
        -dt * torch.rand(H, device=DEVICE) * 16,
        torch.ones(H, 1, device=DEVICE).expand(*shape, H, 1),
    )


INPUTS = {"gdn": gdn_inputs, "mamba2": mamba2_inputs}
