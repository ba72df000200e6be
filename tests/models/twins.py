"""The rules in chunks, written as their equations, for counting their products."""

import torch
from torch import Tensor

from megatron_gdn.models.stack import CHUNK


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(G), exp(G_C - G) and exp(G_i - G_j) of one chunk, for each head."""
    G = g.cumsum(-1)
    pairs = (G[:, :, None] - G[:, None, :]).tril().exp().tril()
    return G.exp()[..., None], (G[:, -1:] - G).exp()[..., None], pairs


def delta_rule(q, k, v, g, beta, S):
    """q, k ``[T, G, K]``; v ``[T, H, V]``; g, beta ``[T, H]``; S ``[H, K, V]``."""
    R, outputs = v.shape[1] // k.shape[1], []

    def of_values(x: Tensor) -> Tensor:
        return x.repeat_interleave(R, 0)

    for start in range(0, len(k), CHUNK):
        part = slice(start, start + CHUNK)
        q_, k_, v_ = (x[part].transpose(0, 1) for x in (q, k, v))
        into, out_of, gamma = _decays(g[part].T)
        b = beta[part].T[..., None]
        L = b * of_values(k_ @ k_.mT) * gamma.tril(-1)
        written = b * (v_ - into * of_values(k_) @ S)
        x = torch.linalg.solve_triangular(
            L + torch.eye(CHUNK), written, upper=False, unitriangular=True
        )
        P = of_values(q_ @ k_.mT) * gamma
        outputs.append((into * of_values(q_)) @ S + P @ x)
        S = into[:, -1:] * S + (out_of * of_values(k_)).mT @ x
    return torch.cat(outputs, 1).transpose(0, 1), S


def kda_rule(q, k, v, g, beta, S):
    """As :func:`delta_rule` with g ``[T, H, K]``, slow: no sum over a chunk is below -60."""
    R, outputs = v.shape[1] // k.shape[1], []
    for start in range(0, len(k), CHUNK):
        part = slice(start, start + CHUNK)
        q_, k_ = (x[part].transpose(0, 1).repeat_interleave(R, 0) for x in (q, k))
        G, v_ = g[part].transpose(0, 1).cumsum(1), v[part].transpose(0, 1)
        b, grown = beta[part].T[..., None], k_ * (-G).exp()
        L = b * ((k_ * G.exp()) @ grown.mT).tril(-1)
        written = b * (v_ - (k_ * G.exp()) @ S)
        x = torch.linalg.solve_triangular(
            L + torch.eye(CHUNK), written, upper=False, unitriangular=True
        )
        P = ((q_ * G.exp()) @ grown.mT).tril()
        outputs.append((q_ * G.exp()) @ S + P @ x)
        S = G[:, -1].exp()[..., None] * S + (k_ * (G[:, -1:] - G).exp()).mT @ x
    return torch.cat(outputs, 1).transpose(0, 1), S


def mamba2_rule(x: Tensor, B: Tensor, C: Tensor, g: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """x ``[T, H, V]``; B, C ``[T, G, K]``; g ``[T, H]``; S ``[H, K, V]``."""
    R, outputs = x.shape[1] // B.shape[1], []
    for start in range(0, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        x_, B_, C_ = (y[part].transpose(0, 1) for y in (x, B, C))
        into, out_of, gamma = _decays(g[part].T)
        P = (C_ @ B_.mT).repeat_interleave(R, 0) * gamma
        B_, C_ = (y.repeat_interleave(R, 0) for y in (B_, C_))
        outputs.append((into * C_) @ S + P @ x_)
        S = into[:, -1:] * S + (out_of * B_).mT @ x_
    return torch.cat(outputs, 1).transpose(0, 1), S
