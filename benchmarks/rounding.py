"""Which of FlashQLA's roundings its error comes from, simulated in fp64 on a CPU.

    python3 benchmarks/rounding.py
    python3 benchmarks/rounding.py --loud 10      # one token in 500 has gradients 2^10
                                                  # times larger
    python3 benchmarks/rounding.py --allow-neg-eigval   # write strengths in (0, 2)

Runs the chunk equations of FlashQLA's Hopper kernels (0.1.3) in fp64 and rounds where
they round: the operands of products in shared memory. Printed are errors over those of
the plain rule in fp32 on the same bf16 q, k, v and d_o with o, dq, dk, dv rounded to
bf16: the ratio that the kernels' accuracy is held to. Truth is fp64 from the same
values before any rounding. "fp16" is what ``rule_operands="fp16"`` does: the gradient
is scaled to the range of fp16 first.

Legend: T tokens, C tokens of a chunk, H heads, D head dim.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from lib.measure import table
from torch import Tensor

from megatron_gdn.gdn.api import torch_chunk_gated_delta_rule
from megatron_gdn.gdn.half import LARGEST_D_O
from megatron_gdn.gdn.half_torch import to_half
from megatron_gdn.ops.elementwise import largest_beta

C = 64
D = 128
H = 4
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
FORWARD = ("A", "Ag", "S", "W", "Vd", "Vn", "Pg")
BACKWARD = (
    "A",
    "Ag",
    "S",
    "W",
    "X",
    "Y",
    "Pg",
    "dS",
    "dV'",
    "dVg",
    "U",
    "V'",
    "dP",
    "dbeta",
    "dAr",
    "A'dAr",
    "dAt",
    "dOg",
)
EVERYWHERE = frozenset(FORWARD + BACKWARD)
WITHOUT = {
    "bf16": (),
    "bf16 but Ag (gated inverse)": ("Ag",),
    "bf16 but Pg (gated q k^T)": ("Pg",),
    "bf16 but Vd, V' (written values)": ("Vd", "V'"),
    "bf16 but all of these and dP, dV'": ("Ag", "Pg", "Vd", "V'", "dP", "dV'"),
    "bf16 but S, dS (states)": ("S", "dS"),
}
# of the layer's A_log
RATES = {"usual": 0.0, "slow": -4.6, "none": -20.0, "strong": 2.8}


class Rounding:
    """``at(name, x)`` is x as the kernel hands it on."""

    def __init__(self, points=EVERYWHERE, dtype: torch.dtype = torch.bfloat16) -> None:
        self.points = points
        self.dtype = dtype

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return x.to(self.dtype).double() if name in self.points else x


class Chunk:
    """One chunk of all heads, ``[H, C, D]``, and what does not need the state."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> None:
        self.q, self.k, self.v, self.beta = (x.movedim(0, 1) for x in (q, k, v, beta))
        G = g.movedim(0, 1).cumsum(-1)
        self.decay_in, self.decay_out = (x.exp()[..., None] for x in (G, G[:, -1:] - G))
        self.decay_all = G[:, -1, None, None].exp()
        above = torch.ones(G.shape[-1], G.shape[-1], dtype=torch.bool).triu(1)
        self.gates = (
            (G[..., :, None] - G[..., None, :]).masked_fill(above, float("-inf")).exp()
        )
        self.kk = self.k @ self.k.mT
        self.scores = self.q @ self.k.mT
        lower = (self.beta[..., None] * self.kk).tril(-1)
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype).expand_as(lower)
        self.inverse = torch.linalg.solve_triangular(
            identity + lower, identity, upper=False, unitriangular=True
        )


def forward(chunks: list[Chunk], at: Rounding, scale: float) -> Tensor:
    S = torch.zeros(H, D, D, dtype=torch.float64)
    outputs = []
    for x in chunks:
        Ag = at("Ag", at("A", x.inverse) * x.gates * x.beta[:, None])
        read = at("S", S)
        written = Ag @ at("W", x.v - x.decay_in * (x.k @ read))
        Pg = at("Pg", scale * x.gates * x.scores)
        outputs.append(scale * x.decay_in * (x.q @ read) + Pg @ at("Vd", written))
        S = x.decay_all * S + x.k.mT @ at("Vn", x.decay_out * written)
    return torch.cat(outputs, 1).movedim(0, 1)


def states(chunks: list[Chunk], at: Rounding) -> list[Tensor]:
    """Before every chunk, as the backward's first kernel computes and stores them."""
    S = torch.zeros(H, D, D, dtype=torch.float64)
    found = []
    for x in chunks:
        found.append(at("S", S))
        X = at("X", -x.beta[..., None] * (at("A", x.inverse).mT @ x.k))
        Y = at("Y", x.decay_all * (x.k @ found[-1]) - x.decay_out * x.v)
        S = x.decay_all * S + X.mT @ Y
    return found


def backward(
    chunks: list[Chunk], d_o: Tensor, at: Rounding, scale: float
) -> list[Tensor]:
    dS = torch.zeros(H, D, D, dtype=torch.float64)
    found = []
    rows = [part.movedim(0, 1) for part in d_o.split(C)]
    for x, d, S in reversed(list(zip(chunks, rows, states(chunks, at), strict=True))):
        A = at("A", x.inverse)
        later = at("dS", dS)
        Ab = A * x.beta[:, None]
        Ag, Pg = at("Ag", Ab * x.gates), at("Pg", scale * x.gates * x.scores)
        d_written = at("dV'", x.decay_out * (x.k @ later) + Pg.mT @ d)
        dv, U = Ag.mT @ d_written, x.k @ S
        W = at("W", x.v - x.decay_in * U)
        written = at("V'", Ag @ W)
        dVg = at("dVg", -x.decay_in * dv)
        dPg = d @ written.mT
        dAb = (d_written @ W.mT) * x.gates
        dP = at("dP", scale * x.gates * dPg)
        crossing = Pg * dPg + dAb * Ab
        dq_read = scale * x.decay_in * (d @ S.mT)
        dk_written = x.decay_out * (written @ later.mT)
        dA = -(at("A'dAr", A.mT @ at("dAr", dAb * x.beta[:, None])) @ A.mT).tril(-1)
        dAt = dA * x.beta[..., None]
        dAs = at("dAt", dAt + at("dAt", dAt).mT)
        dG = (-x.decay_in * dv * at("U", U)).sum(-1) + (x.q * dq_read).sum(-1)
        dG = dG + crossing.sum(-1) - crossing.sum(-2) - (x.k * dk_written).sum(-1)
        dG[:, -1] += (x.k * dk_written).sum((-1, -2)) + (x.decay_all * dS * S).sum(
            (-1, -2)
        )
        found.append(
            (
                dq_read + dP @ x.k,
                dk_written + dVg @ S.mT + dP.mT @ x.q + dAs @ x.k,
                dv,
                dG.flip(-1).cumsum(-1).flip(-1),
                at("dbeta", dAb * A).sum(-2) + (dA * x.kk).sum(-1),
            )
        )
        dOg = at("dOg", scale * x.decay_in * d)
        dS = x.decay_all * dS + x.k.mT @ dVg + x.q.mT @ dOg
    return [
        torch.cat(parts, 1).movedim(0, 1)
        for parts in zip(*reversed(found), strict=True)
    ]


def run(inputs: list[Tensor], d_o: Tensor, at: Rounding) -> list[Tensor]:
    chunks = [
        Chunk(*parts) for parts in zip(*(x.split(C) for x in inputs), strict=True)
    ]
    scale = D**-0.5
    return [forward(chunks, at, scale), *backward(chunks, d_o, at, scale)]


def run_in_fp16(inputs: list[Tensor], d_o: Tensor) -> list[Tensor]:
    half, _, down = to_half(d_o[None], H, LARGEST_D_O)
    found = run(inputs, half[0].double(), Rounding(dtype=torch.float16))
    o, dq, dk, dv = (x.half().double() for x in found[:4])
    return [
        o,
        *(x * down[:, None] for x in (dq, dk, dv)),
        *(x * down for x in found[4:]),
    ]


def truth(inputs: list[Tensor], d_o: Tensor) -> list[Tensor]:
    """From the package's own rule in fp64."""
    leaves = [x[None].requires_grad_() for x in inputs]
    o, _ = torch_chunk_gated_delta_rule(*leaves)
    return [x[0] for x in (o.detach(), *torch.autograd.grad(o, leaves, d_o[None]))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative, in the Frobenius norm, of what leaves the rule: o, dq, dk, dv as
    bf16."""
    found = [x.bfloat16().double() for x in found[:4]] + found[4:]
    return [
        ((x - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)
    ]


def problem(tokens: int, A_log: float) -> tuple[list[Tensor], Tensor]:
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    q, k = (
        torch.nn.functional.normalize(normal(tokens, H, D), dim=-1) for _ in range(2)
    )
    rate = (A_log + 0.3 * normal(H)).exp()
    g = -rate * torch.nn.functional.softplus(normal(tokens, H) + normal(H))
    return [q, k, normal(tokens, H, D), g, normal(tokens, H).sigmoid()], normal(
        tokens, H, D
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=777)
    parser.add_argument(
        "--loud", type=int, default=0, help="log2, of every 500th token's gradient"
    )
    parser.add_argument(
        "--allow-neg-eigval", action="store_true", help="beta in (0, 2)"
    )
    args = parser.parse_args()
    variants = {
        label: partial(run, at=Rounding(EVERYWHERE - set(points)))
        for label, points in WITHOUT.items()
    }
    variants["fp16"] = run_in_fp16
    rows = [["decay", "operands", *NAMES]]
    for decay, A_log in RATES.items():
        inputs, d_o = problem(args.tokens, A_log)
        d_o[::500] *= 2.0**args.loud
        inputs[4] *= largest_beta(args.allow_neg_eigval)
        exact = truth(inputs, d_o)
        inputs[:3] = (x.bfloat16().double() for x in inputs[:3])
        d_o = d_o.bfloat16().double()
        plain = errors(run(inputs, d_o, Rounding(())), exact)
        for label, variant in variants.items():
            found = errors(variant(inputs, d_o), exact)
            ratios = (a / b for a, b in zip(found, plain, strict=True))
            rows.append([decay, label, *(f"{ratio:.2f}" for ratio in ratios)])
    print(table(rows))


if __name__ == "__main__":
    main()
