"""The gated delta rule behind one name: arguments, shapes and the choice of backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..documents import Documents
from .chunk import torch_chunk_gated_delta_rule
from .fla_op import fla_chunk_gated_delta_rule
from .obstacles import FLA_IS_TIMED, why_not_fla
from .recurrent import recurrent_gated_delta_rule

BACKENDS: dict[str, Callable] = {
    "reference": torch_chunk_gated_delta_rule,
    "recurrent": recurrent_gated_delta_rule,
    "fla": fla_chunk_gated_delta_rule,
}


class Backend(NamedTuple):
    """A chosen implementation of the rule: its name, the function, and why it was chosen."""

    name: str
    rule: Callable
    reason: str


def resolve_backend(
    backend: str = "auto",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    key_dim: int | None = None,
    deterministic: bool = False,
) -> Backend:
    """Choose the implementation of the gated delta rule.

    Args:
        backend: ``"reference"`` (plain torch, in chunks), ``"recurrent"`` (plain torch, token by
            token), ``"fla"`` (GPU kernels), or ``"auto"``: fla for bf16 and fp16 on a GPU where it
            works, otherwise the reference. A name that is not ``"auto"`` is never replaced by
            another.
        device, dtype: where and in what the rule will run.
        key_dim: K, where it is known.
        deterministic: ``"auto"`` then takes the reference; ``"fla"`` is refused.

    Raises:
        ValueError: an unknown name, or one that the other arguments rule out.
        ImportError: the backend's package is missing, not of a known version, or known to compute
            wrong results here.
    """
    device = torch.device(device)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(
            f"unknown backend {backend!r}; use 'auto' or one of "
            f"{', '.join(repr(name) for name in BACKENDS)}."
        )
    obstacle = why_not_fla(device, dtype, key_dim) if backend in ("auto", "fla") else None
    if backend == "auto":
        if deterministic:
            return Backend("reference", BACKENDS["reference"], "deterministic mode")
        if obstacle is not None:
            return Backend("reference", BACKENDS["reference"], obstacle.why)
        return Backend("fla", BACKENDS["fla"], f"{dtype} on a GPU")
    if backend == "fla" and deterministic:
        raise ValueError(
            f"backend='fla': {FLA_IS_TIMED}; in deterministic mode use backend='auto' or "
            f"'reference'."
        )
    if obstacle is not None:
        raise obstacle.error(f"backend='fla': {obstacle.why}; use backend='reference'.")
    return Backend(backend, BACKENDS[backend], "requested")


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule. Per value head, with state ``S [K, V]`` in fp32:

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
        o_t = scale * S_t^T q_t

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.)

    Args:
        query, key: ``[B, T, G, K]``, any float dtype. G key heads; value head h reads key head
            ``h // (H // G)``. They are never repeated in memory.
        value: ``[B, T, H, V]``.
        g: ``[B, T, H]``, natural logarithm of the decay, <= 0, fp32.
        beta: ``[B, T, H]``, write strength in (0, 1).
        scale: defaults to ``1 / sqrt(K)``.
        initial_state: ``[N, H, K, V]``; zeros when None. N is B, or the number of documents.
        output_final_state: also return the state after the last token of every sequence.
        use_qk_l2norm_in_kernel: scale query and key to unit length first (eps 1e-6).
        cu_seqlens: cumulative lengths ``[N + 1]`` of documents packed into one row (B must be 1),
            or an already resolved :class:`~megatron_gdn.ops.Documents`. The state starts anew at
            every document.
        chunk_size: tokens per chunk; does not change the result.
        backend: see :func:`resolve_backend`; under ``torch.use_deterministic_algorithms`` as with
            ``deterministic=True``.

    Returns:
        ``o``, ``[B, T, H, V]`` in ``value.dtype``, and the final state ``[N, H, K, V]`` in fp32
        (fp64 for fp64 input), or None.

    Raises:
        ValueError: shapes that do not fit, offsets that do not cover the tokens, an unknown
            backend.
        ImportError: the backend's package is missing.
    """
    chosen = resolve_backend(
        backend,
        device=value.device,
        dtype=value.dtype,
        key_dim=key.shape[-1],
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    arguments = {} if chosen.name == "recurrent" else {"chunk_size": chunk_size}
    return chosen.rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        scale=scale,
        cu_seqlens=cu_seqlens,
        **arguments,
    )
