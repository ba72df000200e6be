"""How the data loader cut packed documents over context-parallel ranks, and which source says it.

| source                                     | says                                                |
|--------------------------------------------|-----------------------------------------------------|
| ``packed_seq_params.cp_partition_mode``    | the cut of this micro-batch                         |
| Megatron's arguments, in a launch          | the cut of its scripts' ``get_batch``, by the flags |
| ``config.cp_partition_mode``               | ``"contiguous"``                                    |
| the layer's option ``cp_layout``           | what the user knows                                 |

Both ``cp_partition_mode`` are fields of newer Megatrons, whose default ``"zigzag"`` says nothing (a
micro-batch with it still contradicts a config with ``"contiguous"``). Megatron's ``get_batch`` sets
no mode, so arguments are not read for a micro-batch that says its cut. Without any source every
document is cut by itself. Batches that are not packed are in zigzag; for these only ``cp_layout``
is read.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..compat.observe import log_once
from ..context_parallel.layouts import SequenceLayout

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

AUTO = "auto"
_LEGAL = (AUTO, *SequenceLayout)
# Arguments of Megatron's scripts. The first that is given says how their ``get_batch`` cuts.
_FLAGS = {
    "hybrid_context_parallel": SequenceLayout.ZIGZAG_BUFFER,
    "sft": SequenceLayout.ZIGZAG,
    "dataloader_inter_document_masking": SequenceLayout.ZIGZAG_BUFFER,
}


def launch_arguments() -> dict[str, Any]:
    """The arguments of a launch of Megatron's scripts; empty outside one."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return {} if args is None else vars(args)


class LoaderLayout:
    """The layout of every micro-batch that a layer is given; ``option`` is its ``cp_layout``."""

    def __init__(self, option: str | SequenceLayout, config: TransformerConfig) -> None:
        self.config = config
        self._found: dict[tuple, SequenceLayout] = {}
        self.option = option

    @property
    def option(self) -> str | SequenceLayout:
        """``cp_layout``; may be set."""
        return self._option

    @option.setter
    def option(self, option: str | SequenceLayout) -> None:
        if option not in _LEGAL:
            raise ValueError(
                f"unknown context-parallel layout {option!r}; use one of "
                f"{', '.join(repr(str(legal)) for legal in _LEGAL)}."
            )
        self._option = option if option == AUTO else SequenceLayout(option)
        self._of_batches = SequenceLayout(SequenceLayout.ZIGZAG if option == AUTO else option)
        self._found.clear()

    def of(self, packed: PackedSeqParams | None) -> SequenceLayout:
        """How this micro-batch was cut; sources that contradict each other are refused."""
        if packed is None:
            return self._of_batches
        return self._of_mode(getattr(packed, "cp_partition_mode", None))

    def of_packed(self) -> SequenceLayout:
        """How packed micro-batches without ``cp_partition_mode`` are cut."""
        return self._of_mode(None)

    def _of_mode(self, mode: str | None) -> SequenceLayout:
        given, flag = launch_arguments(), None
        # A scheduler, in newer Megatrons, cuts by config.cp_partition_mode.
        if given.get("sequence_packing_scheduler") is None:
            flag = next((name for name in _FLAGS if given.get(name)), None)
        key = mode, getattr(self.config, "cp_partition_mode", None), flag
        if key not in self._found:
            self._found[key] = self._resolve(*key)
        return self._found[key]

    def _resolve(self, mode: str | None, by_config: str | None, flag: str | None) -> SequenceLayout:
        said: dict[str, SequenceLayout] = {}  # by source
        if self.option != AUTO:
            said[f"cp_layout={str(self.option)!r}"] = SequenceLayout(self.option)
        contiguous = by_config == SequenceLayout.CONTIGUOUS
        if contiguous:
            said["config.cp_partition_mode='contiguous'"] = SequenceLayout.CONTIGUOUS
        if mode is not None and (mode != SequenceLayout.ZIGZAG or contiguous):
            if mode not in tuple(SequenceLayout):
                raise ValueError(
                    f"packed_seq_params has cp_partition_mode={mode!r}; legal are "
                    f"{', '.join(repr(str(layout)) for layout in SequenceLayout)}."
                )
            said[f"packed_seq_params.cp_partition_mode={mode!r}"] = SequenceLayout(mode)
        elif flag is not None:
            layout = _FLAGS[flag]
            source = f"--{flag.replace('_', '-')}"
            said[f"{source} (with which Megatron's loader cuts {str(layout)!r})"] = layout
        if len(set(said.values())) > 1:
            raise ValueError(
                f"{' and '.join(said)} contradict each other about how packed documents were cut "
                f"over context-parallel ranks; tokens would be taken for others. Leave the layer's "
                f"option cp_layout at 'auto', and let config and packed_seq_params name what the "
                f"loader does."
            )
        layout = next(iter(said.values()), SequenceLayout.ZIGZAG)
        why = ", ".join(said) or "nothing says otherwise"
        log_once(
            f"cp_layout {str(self.option)!r}: packed documents are taken as cut {str(layout)!r} "
            f"over context-parallel ranks ({why})"
        )
        return layout


class FollowsLoader:
    """Mixin of a module with the option ``cp_layout``."""

    loader_layout: LoaderLayout

    @property
    def cp_layout(self) -> str | SequenceLayout:
        """How tokens were cut; a new value counts from the next forward, and all layers need it."""
        return self.loader_layout.option

    @cp_layout.setter
    def cp_layout(self, option: str | SequenceLayout) -> None:
        self.loader_layout.option = option
