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
from typing import TYPE_CHECKING, Any, NamedTuple

from ..compat.observe import log_once
from ..context_parallel.layouts import SequenceLayout

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

AUTO = "auto"
_LEGAL = (AUTO, *SequenceLayout)
_ARGUMENTS = (
    "sequence_packing_scheduler",
    "hybrid_context_parallel",
    "sft",
    "dataloader_inter_document_masking",
)


def launch_arguments() -> dict[str, Any]:
    """The arguments of a launch of Megatron's scripts; empty outside one."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return {} if args is None else vars(args)


class _Said(NamedTuple):
    source: str
    layout: SequenceLayout

    def words(self) -> str:
        if not self.source.startswith("--"):
            return self.source
        return f"{self.source} (with which Megatron's loader cuts {str(self.layout)!r})"


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
        given = launch_arguments()
        arguments = tuple([given.get(name) for name in _ARGUMENTS]) if given else ()
        key = mode, getattr(self.config, "cp_partition_mode", None), arguments
        if key not in self._found:
            self._found[key] = self._resolve(*key)
        return self._found[key]

    def _resolve(
        self, mode: str | None, by_config: str | None, arguments: tuple[Any, ...]
    ) -> SequenceLayout:
        said = []
        if self.option != AUTO:
            said.append(_Said(f"cp_layout={str(self.option)!r}", SequenceLayout(self.option)))
        contiguous = by_config == SequenceLayout.CONTIGUOUS
        if contiguous:
            said.append(_Said("config.cp_partition_mode='contiguous'", SequenceLayout.CONTIGUOUS))
        if mode is not None and (mode != SequenceLayout.ZIGZAG or contiguous):
            if mode not in tuple(SequenceLayout):
                raise ValueError(
                    f"packed_seq_params has cp_partition_mode={mode!r}; legal are "
                    f"{', '.join(repr(str(layout)) for layout in SequenceLayout)}."
                )
            by_batch = f"packed_seq_params.cp_partition_mode={mode!r}"
            said.append(_Said(by_batch, SequenceLayout(mode)))
        elif (by_launch := _said_by(arguments)) is not None:
            said.append(by_launch)
        for one in said[1:]:
            if one.layout is not said[0].layout:
                raise ValueError(
                    f"{said[0].words()} and {one.words()} contradict each other about how packed "
                    f"documents were cut over context-parallel ranks; tokens would be taken for "
                    f"others. Leave the layer's option cp_layout at 'auto', and let config and "
                    f"packed_seq_params name what the loader does."
                )
        layout, why = SequenceLayout.ZIGZAG, "nothing says otherwise"
        if said:
            layout, why = said[0].layout, ", ".join(one.source for one in said)
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


def _said_by(arguments: tuple[Any, ...]) -> _Said | None:
    """The cut of packed documents by ``get_batch`` of pretrain_hybrid.py and pretrain_gpt.py."""
    if not arguments:
        return None
    scheduler, hybrid, sft, whole_buffer = arguments
    if scheduler is not None:  # in newer Megatrons; it cuts by config.cp_partition_mode
        return None
    for flag, is_given, layout in (
        ("--hybrid-context-parallel", hybrid, SequenceLayout.ZIGZAG_BUFFER),
        ("--sft", sft, SequenceLayout.ZIGZAG),
        ("--dataloader-inter-document-masking", whole_buffer, SequenceLayout.ZIGZAG_BUFFER),
    ):
        if is_given:
            return _Said(flag, layout)
    return None
