"""A mixer's parameters in Megatron's checkpoints.

Distributed checkpoints hold ``in_proj`` and the convolution section by section
(``in_proj.weight.query``, ...), because the shards of one section form a regular grid.
Under Megatron-FSDP (fsdp_dtensor) a file holds ``state_dict()``, where
``in_proj.weight`` has the rows of all tensor-parallel ranks end to end. The order of
these rows depends on the tensor-parallel size, so the state dict has an entry with this
size. The entry is 0 if a launch script stores each section by itself.
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
from .precision import FSDP2_CHECKPOINT_ADVICE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

    from ..compat.state_dict import StateDict
    from .interface import Mixer

# Ends of keys in Megatron-Bridge and in peft: tensors of adapters (LoRA, DoRA) that
# have a row for every row of in_proj.
_BRIDGE_KEY_ENDS = (".linear_out.weight", ".linear_out.bias", ".weight_magnitude")
_PEFT_KEY_END = re.compile(r"\.(base_layer|lora_B\.[^.]+)\.(weight|bias)$")
# Ends of keys of tensors with in_proj's rows that megatron-core's layer stores in one
# tensor, not section by section.
_UNSPLIT_UPSTREAM_KEY_ENDS = ("in_proj.bias",) + _BRIDGE_KEY_ENDS

# The convolution's parameters in a mixer without a conv1d module, each with its key in
# files. Megatron's MambaMixer has no such module since 0.19, and files keep the keys of
# the old module.
_CONV_FILE_KEYS = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}
_CONV_NAMES = _CONV_FILE_KEYS.keys() | _CONV_FILE_KEYS.values()

# The entry of a state dict with the order of in_proj's rows: a tensor-parallel size, or
# _SECTION_BY_SECTION.
_ROW_ORDER_KEY = "in_proj_stored_by"
_SECTION_BY_SECTION = 0
# Modules of Megatron-LM's branch dev and of Megatron-Bridge that store in_proj section
# by section.
_CHECKPOINT_SCRIPTS = (
    "megatron.training.checkpointing",
    "megatron.bridge.training.checkpointing",
)


def sharded_state_dict(
    mixer: Mixer,
    prefix: str = "",
    sharded_offsets: tuple = (),
    metadata: dict | None = None,
    tp_group: ProcessGroup | None = None,
) -> StateDict:
    """The mixer's parameters for distributed checkpoints, with Megatron's keys.

    Weights and biases of ``in_proj`` and ``conv1d``, and adapters' tensors with the
    rows of ``in_proj``, are stored section by section. Megatron's layer stores each
    bias and each tensor of an adapter unsplit, and such files load too.
    The arguments are those of Megatron's method of this name.
    """
    if any(isinstance(parameter, DTensor) for parameter in mixer.parameters()):
        raise ValueError(f"{prefix}in_proj.weight: {FSDP2_CHECKPOINT_ADVICE}")
    layout = layout_of_in_proj(mixer.dims)
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    if tp_group is None:
        tp_group = mixer.tp_group

    own: StateDict = {}
    mixer._save_to_state_dict(own, "", keep_vars=True)
    children = dict(mixer.named_children())
    # names of parameters whose dimension 0 is split over tensor-parallel ranks
    split = (
        mixer._keep_in_float32_parameter_names
        + tuple(_CONV_NAMES)
        + mixer.parameters_split_by_heads
    )
    # names of child modules with such parameters
    children_to_split = {name.partition(".")[0] for name in split}
    for name, child in mixer.named_children():
        if name in children_to_split:
            own |= child.state_dict(prefix=f"{name}.", keep_vars=True)
            del children[name]
    groups = {"tp_group": tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    result = make_sharded_tensors_for_checkpoint(
        own, prefix, dict.fromkeys(split, 0), sharded_offsets, **groups
    )
    for name, file_key in _CONV_FILE_KEYS.items():
        if name in own:
            result[f"{prefix}{name}"].key = f"{prefix}{file_key}"
    for name, child in children.items():
        result |= sharded_state_dict_default(
            child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=tp_group
        )

    for key, tensor in result.items():
        name = key.removeprefix(prefix)
        is_of_adapter = name.startswith("in_proj.") and (
            name.endswith(_BRIDGE_KEY_ENDS) or _PEFT_KEY_END.search(name)
        )
        has_in_proj_rows = name in ("in_proj.weight", "in_proj.bias") or (
            is_of_adapter and tensor.data.shape[0] == layout.width
        )
        if name in _CONV_NAMES:
            widths = layout.conv_widths
            names = layout.conv_names
        elif has_in_proj_rows:
            widths = layout.widths
            names = layout.names
        else:
            continue
        # an entry of another kind, such as a factory of tensors, is left as it is
        if isinstance(tensor, ShardedTensor):
            by_section = _split_tensor_factory(tensor, list(widths), list(names), 0)
            if name.endswith(_UNSPLIT_UPSTREAM_KEY_ENDS):
                by_section.build_fn = register_sections_of_upstream(by_section.build_fn)
            result[key] = by_section
    return result


def add_row_order(mixer: Mixer, destination: StateDict, prefix: str) -> None:
    """Under Megatron-FSDP, add the entry that says in which order in_proj's rows are
    stored.

    The first call also lets torch's DefaultLoadPlanner load files without this entry,
    for the whole process.
    """
    weight = mixer.get_submodule("in_proj")._parameters.get("weight")
    if weight is not None and hasattr(weight, "megatron_fsdp_dist_index"):
        _let_planner_load_files_without_entry()
        order = torch.tensor(
            [_row_order(mixer)], dtype=torch.int64, device=weight.device
        )
        destination[f"{prefix}{_ROW_ORDER_KEY}"] = order


def require_row_order(mixer: Mixer, state_dict: StateDict, prefix: str) -> None:
    """Raise a ValueError if ``state_dict`` has in_proj's rows in another order.

    Removes the entry that tells the order from ``state_dict``. Without this entry there
    is no check.
    """
    entry: Tensor | None = state_dict.pop(f"{prefix}{_ROW_ORDER_KEY}", None)
    if entry is None:
        return
    found = int(entry.item())
    if found == _row_order(mixer):
        return
    how = (
        f"Load it with --tensor-model-parallel-size {found}, and with scripts that "
        "store in_proj as a whole."
    )
    if found == _SECTION_BY_SECTION:
        how = (
            "Load it with the scripts that wrote it (Megatron-LM's dev, "
            "Megatron-Bridge)."
        )
    raise ValueError(
        f"{prefix}in_proj.weight: the fsdp_dtensor checkpoint holds "
        f"{_describe_row_order(found)}, this launch reads "
        f"{_describe_row_order(_row_order(mixer))}: weights would be wrong. {how}"
    )


def _row_order(mixer: Mixer) -> int:
    """The order in which this launch stores in_proj's rows, as a value of the entry.

    A script that has ``handle_gdn_in_state_dict`` stores each section by itself.
    """
    imported = [name for name in _CHECKPOINT_SCRIPTS if name in sys.modules]
    split = any(
        vars(sys.modules[name]).get("handle_gdn_in_state_dict") for name in imported
    )
    if mixer.scripts_split_in_proj and split:
        return _SECTION_BY_SECTION
    return mixer.tp_size


def _let_planner_load_files_without_entry() -> None:
    """Change torch's DefaultLoadPlanner, so that a file may lack the entry that tells
    the order of in_proj's rows.

    The class gets the attribute ``_may_lack_row_order``, so a second call does
    nothing.
    """
    if hasattr(DefaultLoadPlanner, "_may_lack_row_order"):
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
        """Call torch's method, then drop each entry `_ROW_ORDER_KEY` that the file does
        not have."""
        set_up(self, state_dict, metadata, *args, **kwargs)
        if metadata is not None:
            keys_in_file = metadata.state_dict_metadata
        else:
            keys_in_file = {}
        for key in list(self.state_dict):
            if key.endswith(f".{_ROW_ORDER_KEY}") and key not in keys_in_file:
                del self.state_dict[key]

    planner: Any = DefaultLoadPlanner
    planner.set_up_planner = set_up_planner
    planner._may_lack_row_order = True


def _describe_row_order(row_order: int) -> str:
    """A phrase for the error that describes ``row_order``, the value of an entry."""
    if row_order == _SECTION_BY_SECTION:
        return "each section by itself"
    return (
        "all rows in one tensor, in the order of "
        f"tensor_model_parallel_size={row_order}"
    )
