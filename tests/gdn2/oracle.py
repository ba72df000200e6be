"""Gated DeltaNet-2's recurrence, one token after the other; and inputs to hold rules to
it."""

import torch
from torch import Tensor

from megatron_gdn.gdn2.rule import GDN2Inputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.elementwise import l2norm

# Log-decays from uniform numbers in (0, 1).
GATES = {
    "none": lambda u: -0.0 * u,
    "slow": lambda u: -1e-4 * u,
    "usual": lambda u: -5 * u,
    "strong": lambda u: -50 * u,
    # Of few tokens that forget all, among others that forget nearly nothing.
    "uneven": lambda u: -100 * u**8,
    "very uneven": lambda u: -1e4 * u**8,
    "a decay of 0": lambda u: torch.where(u < 0.1, -torch.inf, -u),
    # Channels of one head that forget at once beside channels that forget nothing.
    "unequal": lambda u: -torch.logspace(-6, 1.5, u.shape[-1], dtype=u.dtype) * u,
}


def random_inputs(gates, rows, tokens, G=2, H=4, K=5, V=7) -> GDN2Inputs:
    torch.manual_seed(0)

    def normal(*size):
        return torch.randn(rows, tokens, *size, dtype=torch.float64)

    q = l2norm(normal(G, K))
    k = l2norm(normal(G, K))
    v = normal(H, V)
    g = GATES[gates](torch.rand(rows, tokens, G, K, dtype=torch.float64))
    return GDN2Inputs(q, k, v, g, normal(G, K).sigmoid(), normal(H, V).sigmoid())


def recurrent_gdn2(
    inputs: GDN2Inputs,
    documents: Documents | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the last states; differentiable.

    ``documents``: all batch rows end to end; None when a row is one sequence.
    """
    v = inputs.v
    rows = v.shape[:2]
    H, V = v.shape[2:]
    K = inputs.k.shape[-1]
    of_keys = {name: getattr(inputs, name) for name in ("q", "k", "g", "b")}
    repeated = {
        name: x.repeat_interleave(H // x.shape[2], 2) for name, x in of_keys.items()
    }
    tokens = [x.flatten(0, 1) for x in inputs._replace(**repeated)]
    lengths = [rows[1]] * rows[0]
    if documents is not None:
        lengths = [n for n in documents.lengths if n]
    outputs = []
    finals = []
    for n, sequence in enumerate(zip(*(x.split(lengths) for x in tokens), strict=True)):
        S = v.new_zeros(H, K, V) if initial is None else initial[n]
        for q, k, v_t, g, b, w in zip(*sequence, strict=True):
            S = g.exp()[..., None] * S
            erased = torch.einsum("hk,hkv->hv", b * k, S)
            S = S + torch.einsum("hk,hv->hkv", k, w * v_t - erased)
            outputs.append(torch.einsum("hk,hkv->hv", q, S) * K**-0.5)
        finals.append(S)
    return torch.stack(outputs).view(v.shape), torch.stack(finals)
