"""A function given by ``--spec`` is called, also where a GPT builder of Megatron-LM does not.

``pretrain_gpt.py`` of its branch dev imports what ``--spec`` names and hands it to the model, which
takes specs and refuses a function ("specialize for function"). The branches core_r0.19.0 and main
call it with the model's config and the virtual pipeline stage.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

_STAGE = ("vp_stage", "pp_rank")


def call_spec_functions() -> None:
    """Let a ``TransformerBlock`` take ``spec(config, vp_stage=..., pp_rank=...)`` for its spec.

    The block calls the function with those of the two stages that it has parameters for.
    """
    theirs = transformer_block._get_block_submodules
    if getattr(theirs, "_calls_functions", False):
        return

    @functools.wraps(theirs)
    def submodules_of(config: TransformerConfig, spec: Any, *stage: int | None, **named: Any):
        if callable(spec) and not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
            taken = inspect.signature(spec).parameters
            given = dict(zip(_STAGE, stage, strict=False)) | named
            spec = spec(config, **{name: n for name, n in given.items() if name in taken})
        return theirs(config, spec, *stage, **named)

    submodules_of._calls_functions = True  # pyright: ignore[reportAttributeAccessIssue]
    transformer_block._get_block_submodules = submodules_of
