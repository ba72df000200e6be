"""How the data loader cut packed documents over context-parallel ranks.

Four sources may name the layout of packed documents, and must not contradict each
other:

1. the layer's option ``cp_layout``, unless it is ``"auto"``;
2. ``config.cp_partition_mode``, if it is ``"contiguous"``;
3. ``packed_seq_params.cp_partition_mode``; the value ``"zigzag"`` counts only if the
   config says ``"contiguous"``, since newer Megatrons set it in every
   ``packed_seq_params``;
4. if 3 names none, the flags of a launch of Megatron's scripts.

If no source names a layout, the layout is zigzag. Batches that are not packed are cut
by ``cp_layout``, or in zigzag if ``cp_layout`` is ``"auto"``.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from ..compat.observe import log_once
from ..context_parallel.layouts import SequenceLayout

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

AUTO = "auto"
_LEGAL_CP_LAYOUTS = (AUTO,) + tuple(SequenceLayout)
# The layout into which ``get_batch`` of Megatron's scripts cuts, for each flag; the
# first flag that is set decides.
_LAYOUT_BY_FLAG = {
    "hybrid_context_parallel": SequenceLayout.ZIGZAG_BUFFER,
    "sft": SequenceLayout.ZIGZAG,
    "dataloader_inter_document_masking": SequenceLayout.ZIGZAG_BUFFER,
}


def launch_arguments() -> dict[str, Any]:
    """The arguments of a launch of Megatron's scripts; empty outside of a launch."""
    args = getattr(
        sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None
    )
    if args is None:
        return {}
    return vars(args)


def check_cp_layout(option: str | SequenceLayout) -> None:
    """Raise a ValueError for an unknown ``cp_layout``."""
    if option not in _LEGAL_CP_LAYOUTS:
        raise ValueError(
            f"unknown context-parallel layout {option!r}; use one of "
            f"{', '.join(repr(str(legal)) for legal in _LEGAL_CP_LAYOUTS)}."
        )


class LoaderLayout:
    """Finds the layout of each micro-batch of a layer; ``option`` is the layer's
    ``cp_layout``."""

    def __init__(self, option: str | SequenceLayout, config: TransformerConfig) -> None:
        self.config = config
        self.set_option(option)

    def set_option(self, option: str | SequenceLayout) -> None:
        """Set the layer's ``cp_layout``; an unknown layout is a ValueError."""
        check_cp_layout(option)
        if option == AUTO:
            self.option = option
        else:
            self.option = SequenceLayout(option)

    def of(self, packed: PackedSeqParams | None) -> SequenceLayout:
        """How the loader cut a micro-batch; ``packed`` is None if the micro-batch is
        not packed.

        Raises a ValueError if sources contradict each other.
        """
        if packed is not None:
            return self.of_packed(getattr(packed, "cp_partition_mode", None))
        if self.option == AUTO:
            return SequenceLayout.ZIGZAG
        return SequenceLayout(self.option)

    def of_packed(self, mode: str | None = None) -> SequenceLayout:
        """How the loader cut packed micro-batches; ``mode`` is their
        ``cp_partition_mode``."""
        arguments = launch_arguments()
        flag = None
        # With newer Megatrons' packing scheduler, config.cp_partition_mode decides, not
        # a flag.
        if arguments.get("sequence_packing_scheduler") is None:
            flag = next((name for name in _LAYOUT_BY_FLAG if arguments.get(name)), None)
        by_config = getattr(self.config, "cp_partition_mode", None)
        return _layout_of_sources(self.option, mode, by_config, flag)


@cache
def _layout_of_sources(
    option: str | SequenceLayout,
    mode: str | None,
    by_config: str | None,
    flag: str | None,
) -> SequenceLayout:
    """The layout that the sources name.

    ``option`` is the layer's ``cp_layout``; ``mode`` and ``by_config`` are
    ``cp_partition_mode`` of the micro-batch and of the config; ``flag`` is a key of
    _LAYOUT_BY_FLAG.
    """
    # the layout that each source names, by a description of the source
    named: dict[str, SequenceLayout] = {}
    if option != AUTO:
        named[f"cp_layout={str(option)!r}"] = SequenceLayout(option)
    contiguous = by_config == SequenceLayout.CONTIGUOUS
    if contiguous:
        named["config.cp_partition_mode='contiguous'"] = SequenceLayout.CONTIGUOUS
    if mode is not None and (mode != SequenceLayout.ZIGZAG or contiguous):
        if mode not in tuple(SequenceLayout):
            raise ValueError(
                f"packed_seq_params has cp_partition_mode={mode!r}; legal are "
                f"{', '.join(repr(str(layout)) for layout in SequenceLayout)}."
            )
        named[f"packed_seq_params.cp_partition_mode={mode!r}"] = SequenceLayout(mode)
    elif flag is not None:
        layout = _LAYOUT_BY_FLAG[flag]
        source = f"--{flag.replace('_', '-')}"
        named[f"{source} (with which Megatron's loader cuts {str(layout)!r})"] = layout
    if len(set(named.values())) > 1:
        raise ValueError(
            f"{' and '.join(named)} contradict each other about how packed documents "
            "were cut over context-parallel ranks, so tokens would be in wrong places. "
            "Leave the layer's option cp_layout at 'auto', and let config and "
            "packed_seq_params name the loader's cut."
        )
    layout = next(iter(named.values()), SequenceLayout.ZIGZAG)
    why = ", ".join(named) or "no setting names a layout"
    log_once(
        f"cp_layout {str(option)!r}: packed documents are taken as cut {str(layout)!r} "
        f"over context-parallel ranks ({why})"
    )
    return layout


class HasCpLayout:
    """Mixin for modules with the option ``cp_layout``, which says how the loader cuts
    sequences."""

    loader_layout: LoaderLayout

    @property
    def cp_layout(self) -> str | SequenceLayout:
        """How the data loader cuts sequences for context parallelism. A new value must
        be set in all layers; the next forward reads it."""
        return self.loader_layout.option

    @cp_layout.setter
    def cp_layout(self, option: str | SequenceLayout) -> None:
        self.loader_layout.set_option(option)
