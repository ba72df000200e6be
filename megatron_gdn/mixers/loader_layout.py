"""How the data loader cut packed documents over context-parallel ranks.

Four sources name the cut: ``packed_seq_params.cp_partition_mode`` or, if it is None,
the flags of a launch of Megatron's scripts; ``config.cp_partition_mode`` if it is
``"contiguous"``; and the layer's option ``cp_layout``. Newer Megatrons set ``"zigzag"``
in all ``packed_seq_params``, so ``"zigzag"`` is ignored unless the config has
``"contiguous"``. By default each document is cut in zigzag. Batches that are not packed
are cut by ``cp_layout``, in zigzag if it is ``"auto"``.
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
_LEGAL = (AUTO,) + tuple(SequenceLayout)
# The cut of ``get_batch`` in Megatron's scripts, by flag; the first flag that is set
# decides.
_FLAGS = {
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
    if option not in _LEGAL:
        raise ValueError(
            f"unknown context-parallel layout {option!r}; use one of "
            f"{', '.join(repr(str(legal)) for legal in _LEGAL)}."
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
        """How the loader cut a micro-batch; sources that contradict each other are
        refused."""
        if packed is not None:
            return self.of_packed(getattr(packed, "cp_partition_mode", None))
        return SequenceLayout(
            SequenceLayout.ZIGZAG if self.option == AUTO else self.option
        )

    def of_packed(self, mode: str | None = None) -> SequenceLayout:
        """How the loader cut packed micro-batches; ``mode`` is their
        ``cp_partition_mode``."""
        arguments = launch_arguments()
        flag = None
        # With newer Megatrons' packing scheduler, config.cp_partition_mode decides, not
        # a flag.
        if arguments.get("sequence_packing_scheduler") is None:
            flag = next((name for name in _FLAGS if arguments.get(name)), None)
        by_config = getattr(self.config, "cp_partition_mode", None)
        return _layout_of_sources(self.option, mode, by_config, flag)


@cache
def _layout_of_sources(
    option: str | SequenceLayout,
    mode: str | None,
    by_config: str | None,
    flag: str | None,
) -> SequenceLayout:
    """The cut that the layer's ``option``, packing ``mode``, config and launch ``flag``
    name."""
    named: dict[str, SequenceLayout] = {}  # source -> the layout that it names
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
        layout = _FLAGS[flag]
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


class FollowsLoader:
    """Mixin for modules with the option ``cp_layout``, which says how the loader cuts
    sequences."""

    loader_layout: LoaderLayout

    @property
    def cp_layout(self) -> str | SequenceLayout:
        """How the loader cuts. Set a new value in all layers; it holds from the next
        forward on."""
        return self.loader_layout.option

    @cp_layout.setter
    def cp_layout(self, option: str | SequenceLayout) -> None:
        self.loader_layout.set_option(option)
