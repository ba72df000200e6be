"""What a layer runs with: the delta rule for a device and dtype, and the schemes that it allows.

Neither is known for sure when a layer is built. Megatron builds models on the CPU
(``--use-cpu-initialization``) or the meta device and moves them later, ``Float16Module`` casts
them, and a config may say ``bf16=True`` without a ``params_dtype``. So a layer chooses when it is
built, for what it expects, and again when rows of another kind arrive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from .context_parallel import ContextParallel, LinearCpMode, SequenceLayout
from .dims import GDNDims
from .mixer import heads_of
from .observe import log_once
from .ops.delta_rule.base import Core
from .ops.delta_rule.resolve import resolve_core


class Execution(NamedTuple):
    core: Core
    context_parallel: ContextParallel


class Executions:
    """How one layer runs on every device type and dtype that it meets.

    Deterministic are those made under ``config.deterministic_mode``, or while
    ``torch.use_deterministic_algorithms`` is on.

    Args:
        config: says what to expect: its dtype, on a GPU if there is one.
        dims: sizes on one tensor-parallel rank.
        group: the context-parallel group.
        layout: how the ranks' tokens were cut from the sequence.
        backend, operands, normalise_qk: see :func:`megatron_gdn.ops.fused.resolve_core`.
        mode: ``linear_cp_mode``; None: the config's, else auto.

    Raises:
        ValueError, ImportError, NotImplementedError: what :func:`resolve_core` and
            :class:`ContextParallel` raise for what is expected; :meth:`of` for what has come.
    """

    def __init__(
        self,
        config: TransformerConfig,
        dims: GDNDims,
        group: Any,
        layout: SequenceLayout,
        *,
        backend: str,
        operands: str,
        normalise_qk: bool,
        mode: str | LinearCpMode | None,
    ) -> None:
        self._config, self._dims, self._group, self._layout = config, dims, group, layout
        self._rule = {"backend": backend, "operands": operands, "normalise_qk": normalise_qk}
        self._mode = LinearCpMode.of(mode, config)
        self._made: dict[tuple, Execution] = {}
        self.latest = self.of(_expected_device(), _expected_dtype(config))

    def of(self, device: torch.device, dtype: torch.dtype) -> Execution:
        """For projection rows on ``device`` in ``dtype``; from here on the latest."""
        switched_on = torch.are_deterministic_algorithms_enabled()
        key = device.type, dtype, self._config.deterministic_mode or switched_on
        if key not in self._made:
            self._made[key] = self._make(device, dtype, deterministic=key[-1])
        self.latest = self._made[key]
        return self.latest

    def _make(self, device: torch.device, dtype: torch.dtype, deterministic: bool) -> Execution:
        core, reason = resolve_core(
            device=device, dtype=dtype, sizes=heads_of(self._dims),
            deterministic=deterministic, **self._rule,
        )  # fmt: skip
        log_once(f"GatedDeltaNet: delta rule backend {core.name!r} ({reason})")
        schemes = ContextParallel(
            self._dims, self._group, self._layout,
            mode=self._mode, core=core, element_size=dtype.itemsize,
        )  # fmt: skip
        return Execution(core, schemes)


def _expected_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _expected_dtype(config: TransformerConfig) -> torch.dtype:
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else config.params_dtype
