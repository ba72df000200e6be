"""fsdp_dtensor checkpoints say how the rows of ``in_proj`` lie in them.

Under Megatron-FSDP a file holds ``state_dict()``. Its ``in_proj.weight`` is the rows of all
tensor-parallel ranks end to end, and each rank's rows are several sections. So the same rows lie in
another order at every tensor-parallel size, in a tensor of one shape, and torch loads them as they
lie: without a word in the file, a load at another size gives wrong weights without an error.
Scripts of Megatron-LM's dev and of Bridge store each section by itself. Where keys may be missing
(``--no-strict-fsdp-dtensor-load``), a script that asks for the whole tensor loads nothing of these.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

_KEY = "in_proj_stored_by"
_SECTIONS = 0
# Where scripts keep the function that stores sections, if theirs has one.
_SCRIPTS = ("megatron.training.checkpointing", "megatron.bridge.training.checkpointing")


class SaysStoredRows(nn.Module):
    """Mixin of a mixer: under Megatron-FSDP its state dict says how ``in_proj`` is stored.

    The entry is the tensor-parallel size, or 0 by section. Files without it (of Megatron's own
    layer) load as they did.

    Attributes:
        stored_by_section: whether the scripts that cut ``in_proj`` know this mixer's sections.
    """

    tp_size: int
    stored_by_section: ClassVar[bool] = False

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self.get_submodule("in_proj")._parameters.get("weight")
        if weight is not None and hasattr(weight, "megatron_fsdp_dist_index"):
            _load_files_that_do_not_say()
            destination[f"{prefix}{_KEY}"] = torch.tensor([self._stored_by()], device=weight.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as torch does.

        Raises:
            ValueError: the rows in the file have another order, or lie in other tensors.
        """
        said: Tensor | None = state_dict.pop(f"{prefix}{_KEY}", None)
        if said is not None and (found := int(said.item())) != self._stored_by():
            raise ValueError(
                f"{prefix}in_proj.weight: the fsdp_dtensor checkpoint holds {_words(found)}; this "
                f"launch reads {_words(self._stored_by())}. The weights would be wrong. "
                + (
                    "Load it with the scripts that wrote it (Megatron-LM's dev, Megatron-Bridge)."
                    if found == _SECTIONS
                    else f"Load it with --tensor-model-parallel-size {found}, and with scripts "
                    f"that store in_proj as a whole."
                )
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _stored_by(self) -> int:
        scripts = [vars(sys.modules[name]) for name in _SCRIPTS if name in sys.modules]
        cut = any(script.get("handle_gdn_in_state_dict") for script in scripts)
        return _SECTIONS if self.stored_by_section and cut else self.tp_size


def _load_files_that_do_not_say() -> None:
    """torch's loads ask a file for the entry only if it has it; else they refuse the file."""
    if hasattr(DefaultLoadPlanner, "_asks_for_stored_rows"):
        return
    set_up = DefaultLoadPlanner.set_up_planner

    @wraps(set_up)
    def set_up_planner(self: Any, state_dict: Any, metadata: Any = None, *args: Any, **kwargs: Any):
        set_up(self, state_dict, metadata, *args, **kwargs)
        stored = metadata.state_dict_metadata if metadata is not None else {}
        for key in [key for key in self.state_dict if key.endswith(f".{_KEY}")]:
            if key not in stored:
                del self.state_dict[key]

    planner: Any = DefaultLoadPlanner
    planner.set_up_planner, planner._asks_for_stored_rows = set_up_planner, True


def _words(stored_by: int) -> str:
    if stored_by == _SECTIONS:
        return "its sections, each by itself"
    return f"its rows as a whole, in their order at tensor_model_parallel_size={stored_by}"
