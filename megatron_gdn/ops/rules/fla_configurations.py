"""One configuration for each of fla's Triton kernels, whatever a timing would say.

fla times a kernel in several configurations (tile sizes, warps, stages) and keeps the
fastest. Another process may keep another one, which adds in another order. Inside
:func:`fixed_configurations` each kernel has one configuration, so the same inputs give
the same bits in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, NamedTuple


class Configuration(NamedTuple):
    """A configuration of a Triton kernel, as fla's list of the kernel has it."""

    warps: int
    stages: int
    tiles: dict[str, int] = {}  # noqa: RUF012  constants by name, such as BK


# What fla's timing chose on an H200 for 8192 tokens. A kernel that is not listed takes
# the first configuration of fla's list.
FIXED: dict[str, Configuration] = {
    "chunk_bwd_kernel_dh": Configuration(8, 3, {"BK": 32, "BV": 64}),
    "chunk_bwd_kernel_dv": Configuration(4, 2),
    "chunk_bwd_kernel_dv_local": Configuration(4, 3),
    "chunk_fwd_kernel_h": Configuration(8, 4, {"BK": 64, "BV": 64}),
    "chunk_fwd_kernel_o": Configuration(4, 3, {"BK": 64, "BV": 64}),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": Configuration(4, 3, {"BV": 32}),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": Configuration(4, 4, {"BV": 32}),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": Configuration(1, 3, {"BK": 64}),
    "chunk_gdn2_bwd_kernel_intra": Configuration(1, 3),
    "chunk_gdn2_bwd_kernel_wy_dqkg_fused": Configuration(2, 3, {"BK": 32, "BV": 32}),
    "chunk_gdn2_fwd_kernel_inter_solve_fused": Configuration(1, 3, {"BK": 32}),
    "chunk_gdn2_fwd_kernel_intra_token_parallel": Configuration(1, 3, {"BH": 2}),
    "chunk_gla_fwd_kernel_o": Configuration(4, 2, {"BK": 64, "BV": 128}),
    "chunk_kda_bwd_kernel_dAv": Configuration(4, 4),
    "chunk_kda_bwd_kernel_intra": Configuration(1, 2),
    "chunk_kda_bwd_kernel_wy_dqkg_fused": Configuration(4, 3, {"BK": 64, "BV": 64}),
    "chunk_kda_fwd_kernel_inter_solve_fused": Configuration(1, 3, {"BK": 32}),
    "chunk_kda_fwd_kernel_intra_sub_chunk": Configuration(1, 3),
    "chunk_kda_fwd_kernel_intra_token_parallel": Configuration(1, 3, {"BH": 2}),
    "chunk_local_cumsum_scalar_kernel": Configuration(2, 3),
    "chunk_local_cumsum_vector_kernel": Configuration(2, 3, {"BS": 32}),
    "prepare_wy_repr_bwd_kernel": Configuration(4, 3),
    "recompute_w_u_fwd_gdn2_kernel": Configuration(8, 4),
    "recompute_w_u_fwd_kda_kernel": Configuration(8, 3),
    "recompute_w_u_fwd_kernel": Configuration(4, 3),
}

# fla's kernels that rules call lie in these packages.
_PACKAGES = (
    "fla.ops.common",
    "fla.ops.cp",
    "fla.ops.gated_delta_rule",
    "fla.ops.gdn2",
    "fla.ops.gla",
    "fla.ops.kda",
    "fla.ops.simple_gla",
    "fla.ops.utils",
)
# A thread that leaves the block must not give a kernel its list back while another
# thread is inside.
_LOCK = RLock()


@contextmanager
def fixed_configurations() -> Iterator[None]:
    """Let each of fla's kernels run in one configuration inside this block."""
    with _LOCK:
        for kernel, fixed, _ in tuned_kernels():
            kernel.configs = fixed
        try:
            yield
        finally:
            for kernel, _, timed in tuned_kernels():
                kernel.configs = timed


class _Tuned(NamedTuple):
    """A kernel of fla's with the list of its fixed configuration and fla's own list."""

    kernel: Any  # a triton.runtime.autotuner.Autotuner
    fixed: list[Any]
    timed: list[Any]


@cache
def tuned_kernels() -> tuple[_Tuned, ...]:
    """Each kernel of the packages that fla would time."""
    from triton.runtime.autotuner import Autotuner

    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(_PACKAGES):
            continue
        for value in vars(module).values():
            while not isinstance(value, Autotuner) and hasattr(value, "fn"):
                value = value.fn  # what Triton's heuristics stand around
            if isinstance(value, Autotuner):
                found[id(value)] = value
    return tuple(
        _Tuned(kernel, [_configuration_of(kernel)], kernel.configs)
        for kernel in found.values()
    )


def _configuration_of(kernel: Any) -> Any:
    """The kernel's configuration of ``FIXED`` in its own list, or the first one of its
    list."""
    wanted = FIXED.get(kernel.base_fn.__name__)
    for listed in kernel.configs:
        it = Configuration(listed.num_warps, listed.num_stages, listed.kwargs)
        if it == wanted:
            return listed
    return kernel.configs[0]
