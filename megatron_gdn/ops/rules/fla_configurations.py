"""One fixed configuration for each of fla's Triton kernels.

fla times a kernel in several configurations (tile sizes, warps, stages) and keeps the
fastest. Another process may find another configuration fastest, which adds in another
order. Inside :func:`without_autotuning` each kernel has one configuration, so the same
inputs give the same bits in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, NamedTuple


class Configuration(NamedTuple):
    """One entry of fla's list of configurations for a Triton kernel."""

    warps: int
    stages: int
    tiles: dict[str, int] = {}  # noqa: RUF012  constants by name, such as BK


# By kernel, the configuration that fla's timing chose on an H200 for 8192 tokens. A
# kernel that is not in this table takes the first configuration of fla's list.
FIXED_CONFIGURATIONS: dict[str, Configuration] = {
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

# the packages of fla with kernels that rules call
_KERNEL_PACKAGES = (
    "fla.ops.common",
    "fla.ops.cp",
    "fla.ops.gated_delta_rule",
    "fla.ops.gdn2",
    "fla.ops.gla",
    "fla.ops.kda",
    "fla.ops.simple_gla",
    "fla.ops.utils",
)
# Only one thread at a time may be inside :func:`without_autotuning`, since a thread
# that leaves it restores the kernels' lists.
_CONFIGURATION_LOCK = RLock()


@contextmanager
def without_autotuning() -> Iterator[None]:
    """A context in which each of fla's kernels has one configuration."""
    with _CONFIGURATION_LOCK:
        for kernel, fixed, _ in tuned_kernels():
            kernel.configs = fixed
        try:
            yield
        finally:
            for kernel, _, timed in tuned_kernels():
                kernel.configs = timed


class _TunedKernel(NamedTuple):
    """A kernel of fla that chooses among configurations by timing them."""

    kernel: Any  # a triton.runtime.autotuner.Autotuner
    fixed_list: list[Any]  # a list with its one fixed configuration
    timed_list: list[Any]  # fla's own list, whose entries fla would time


@cache
def tuned_kernels() -> tuple[_TunedKernel, ...]:
    """Each kernel of ``_KERNEL_PACKAGES`` that fla would time, in the modules that are
    imported now. A rule has imported fla before, whose layers import all these
    packages."""
    from triton.runtime.autotuner import Autotuner

    found: dict[int, Any] = {}  # by id, since several modules may have a kernel
    for name, module in list(sys.modules.items()):
        if not name.startswith(_KERNEL_PACKAGES):
            continue
        for value in vars(module).values():
            while not isinstance(value, Autotuner) and hasattr(value, "fn"):
                value = value.fn  # the kernel inside one of Triton's decorators
            if isinstance(value, Autotuner):
                found[id(value)] = value
    return tuple(
        _TunedKernel(kernel, [_configuration_of(kernel)], kernel.configs)
        for kernel in found.values()
    )


def _configuration_of(kernel: Any) -> Any:
    """The entry of ``kernel.configs`` that ``FIXED_CONFIGURATIONS`` names; the first
    entry if there is none. ``kernel`` is a Triton ``Autotuner``."""
    fixed = FIXED_CONFIGURATIONS.get(kernel.base_fn.__name__)
    for entry in kernel.configs:
        configuration = Configuration(entry.num_warps, entry.num_stages, entry.kwargs)
        if configuration == fixed:
            return entry
    return kernel.configs[0]
