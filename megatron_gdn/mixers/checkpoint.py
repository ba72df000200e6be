"""A mixer's parameters in Megatron's checkpoints.

Distributed checkpoints hold ``in_proj`` and the convolution section by section
(``in_proj.weight.query``, ...), because the shards of one section form a regular grid.
Under Megatron-FSDP (fsdp_dtensor) a file holds ``state_dict()``, where
``in_proj.weight`` has the rows of all tensor-parallel ranks end to end. The order of
these rows depends on the tensor-parallel size, so the state dict has an entry with this
size (0 if a launch script stores each section by itself).
"""

from __future__ import annotations

import re
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from ..compat.checkpoints import register_sections_of_upstream
from ..ops.layout import layout_of_in_proj
from .precision import NOT_BY_SECTION

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

    from ..compat.state_dict import StateDict
    from .interface import Mixer

# Ends of keys in Megatron-Bridge and in peft: tensors of adapters (LoRA, DoRA) that
# have a row for every row of in_proj.
_ADAPTER_ROWS = (".linear_out.weight", ".linear_out.bias", ".weight_magnitude")
_PEFT_ROWS = re.compile(r"\.(base_layer|lora_B\.[^.]+)\.(weight|bias)$")
# Tensors that have in_proj's rows, but that megatron-core's layer stores whole.
_WHOLE_UPSTREAM = ("in_proj.bias",) + _ADAPTER_ROWS

# Parameters of the convolution in a mixer without a conv1d module, and their keys in
# files. Megatron's MambaMixer has no such module since 0.19, and files keep the keys of
# the old module.
_CONV_PARAMETERS = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}
_CONV = _CONV_PARAMETERS.keys() | _CONV_PARAMETERS.values()

_ENTRY_KEY = "in_proj_stored_by"
_SECTIONS = 0
# In Megatron-LM's branch dev and in Megatron-Bridge these modules store in_proj section
# by section.
_SCRIPTS = ("megatron.training.checkpointing", "megatron.bridge.training.checkpointing")


def sharded_state_dict(
    mixer: Mixer,
    prefix: str = "",
    sharded_offsets: tuple = (),
    metadata: dict | None = None,
    tp_group: ProcessGroup | None = None,
) -> StateDict:
    """The mixer's parameters for distributed checkpoints, with Megatron's keys.

    Weights and biases of ``in_proj`` and ``conv1d``, and adapters' tensors with the
    rows of ``in_proj``, are stored section by section. Megatron's layer stores biases
    and adapters whole, and such files load too. The arguments are those of Megatron's
    method of this name.
    """
    if any(isinstance(parameter, DTensor) for parameter in mixer.parameters()):
        raise ValueError(f"{prefix}in_proj.weight: {NOT_BY_SECTION}")
    layout = layout_of_in_proj(mixer.dims)
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    if tp_group is None:
        tp_group = mixer.tp_group

    own: StateDict = {}
    mixer._save_to_state_dict(own, "", keep_vars=True)
    children = dict(mixer.named_children())
    split = (
        mixer._keep_in_float32_parameter_names
        + tuple(_CONV)
        + mixer.parameters_split_by_heads
    )
    # children with parameters that have rows per head
    with_rows = {name.partition(".")[0] for name in split}
    for name, child in mixer.named_children():
        if name in with_rows:
            own |= child.state_dict(prefix=f"{name}.", keep_vars=True)
            del children[name]
    groups = {"tp_group": tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    result = make_sharded_tensors_for_checkpoint(
        own, prefix, dict.fromkeys(split, 0), sharded_offsets, **groups
    )
    for name, stored in _CONV_PARAMETERS.items():
        if name in own:
            result[f"{prefix}{name}"].key = f"{prefix}{stored}"
    for name, child in children.items():
        result |= sharded_state_dict_default(
            child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=tp_group
        )

    for key, tensor in result.items():
        name = key.removeprefix(prefix)
        of_adapter = name.startswith("in_proj.") and (
            name.endswith(_ADAPTER_ROWS) or _PEFT_ROWS.search(name)
        )
        by_row = of_adapter and tensor.data.shape[0] == layout.width
        if name in _CONV:
            sections = layout.conv_widths, layout.conv_names
        elif name in ("in_proj.weight", "in_proj.bias") or by_row:
            sections = layout.widths, layout.names
        else:
            continue
        if isinstance(tensor, ShardedTensor):
            widths, names = sections
            stored = _split_tensor_factory(tensor, list(widths), list(names), 0)
            if name.endswith(_WHOLE_UPSTREAM):
                stored.build_fn = register_sections_of_upstream(stored.build_fn)
            result[key] = stored
    return result


def add_row_order(mixer: Mixer, destination: StateDict, prefix: str) -> None:
    """Under Megatron-FSDP, add the entry that says in which order in_proj's rows are
    stored.

    The first call also lets torch's DefaultLoadPlanner load files without this entry,
    for the whole process.
    """
    weight = mixer.get_submodule("in_proj")._parameters.get("weight")
    if weight is not None and hasattr(weight, "megatron_fsdp_dist_index"):
        _load_files_without_entry()
        order = torch.tensor([_row_order(mixer)], device=weight.device)
        destination[f"{prefix}{_ENTRY_KEY}"] = order


def require_row_order(mixer: Mixer, state_dict: StateDict, prefix: str) -> None:
    """Refuse a file with another order of in_proj's rows; files without the entry
    pass."""
    entry: Tensor | None = state_dict.pop(f"{prefix}{_ENTRY_KEY}", None)
    if entry is None or (found := int(entry.item())) == _row_order(mixer):
        return
    how = (
        f"Load it with --tensor-model-parallel-size {found}, and with scripts that "
        "store in_proj as a whole."
    )
    if found == _SECTIONS:
        how = (
            "Load it with the scripts that wrote it (Megatron-LM's dev, "
            "Megatron-Bridge)."
        )
    raise ValueError(
        f"{prefix}in_proj.weight: the fsdp_dtensor checkpoint holds "
        f"{_order_in_words(found)}, this launch reads "
        f"{_order_in_words(_row_order(mixer))}: weights would be wrong. {how}"
    )


def _row_order(mixer: Mixer) -> int:
    """The tensor-parallel size that orders in_proj's stored rows; 0: section by
    section."""
    scripts = [vars(sys.modules[name]) for name in _SCRIPTS if name in sys.modules]
    cut = any(script.get("handle_gdn_in_state_dict") for script in scripts)
    if mixer.scripts_split_in_proj and cut:
        return _SECTIONS
    return mixer.tp_size


def _load_files_without_entry() -> None:
    """Let torch load files without the entry that tells the order of ``in_proj``'s
    rows."""
    if hasattr(DefaultLoadPlanner, "_asks_for_stored_rows"):
        return
    set_up = DefaultLoadPlanner.set_up_planner

    @wraps(set_up)
    def set_up_planner(
        self: DefaultLoadPlanner,
        state_dict: StateDict,
        metadata: Metadata | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Call torch's method, then drop the entries `_ENTRY_KEY` that the file does
        not have."""
        set_up(self, state_dict, metadata, *args, **kwargs)
        if metadata is not None:
            stored = metadata.state_dict_metadata
        else:
            stored = {}
        for key in [key for key in self.state_dict if key.endswith(f".{_ENTRY_KEY}")]:
            if key not in stored:
                del self.state_dict[key]

    planner: Any = DefaultLoadPlanner
    planner.set_up_planner = set_up_planner
    planner._asks_for_stored_rows = True


def _order_in_words(stored_by: int) -> str:
    """Describe in_proj's row order; ``stored_by`` is a tensor-parallel size, or 0
    (sections)."""
    if stored_by == _SECTIONS:
        return "each section by itself"
    return (
        "all rows in one tensor, in the order of "
        f"tensor_model_parallel_size={stored_by}"
    )
