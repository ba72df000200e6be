"""Run on every rank: an adapter around ``in_proj`` with the names of peft, as mcore-bridge's."""

import torch
from megatron.core import dist_checkpointing
from torch import Tensor, nn

from megatron_gdn.mixers.init import take_share
from tests.distributed.adapter_laws import RANK, Adapter
from tests.distributed.layer_laws import build_layer
from tests.distributed.mixer_laws import groups_of_megatron
from tests.distributed.model_laws import metadata
from tests.parallel import make_config, parallel


class Adapted(nn.Module):
    def __init__(self, linear) -> None:
        super().__init__()
        adapter = Adapter(linear)
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": adapter.linear_in})
        self.lora_B = nn.ModuleDict({"default": adapter.linear_out})

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        parts = {
            "base_layer.": self.base_layer,
            "lora_A.default.": self.lora_A["default"],
            "lora_B.default.": self.lora_B["default"],
        }
        return {
            key: value
            for name, part in parts.items()
            for key, value in part.sharded_state_dict(
                f"{prefix}{name}", sharded_offsets, metadata
            ).items()
        }


def _build(tp: int):
    """A layer, and what its adapted ``in_proj`` holds: this rank's share of numbers of one seed."""
    torch.manual_seed(11)
    layer = build_layer(make_config(tensor_model_parallel_size=tp), groups_of_megatron(), {})
    layer.in_proj = Adapted(layer.in_proj)
    rows, columns = layer.global_dims.layout.widths, layer.global_dims.hidden_size
    sizes = {
        "base_layer.weight": (rows, columns),
        "lora_A.default.weight": ((RANK,), columns),
        "lora_B.default.weight": (rows, RANK),
    }
    expected = {
        name: take_share(torch.randn(sum(sections), n), 0, sections, layer.tp_group.rank(), tp)
        for name, (sections, n) in sizes.items()
    }
    return layer, expected


def _state(layer) -> dict:
    state = layer.sharded_state_dict("layer.", metadata=metadata())
    return {key: x for key, x in state.items() if key.endswith(".weight") and ".in_proj." in key}


def save(folder: str, tp: int) -> None:
    with parallel(tp=tp):
        layer, values = _build(tp)
        layer.in_proj.load_state_dict(values, strict=False)
        dist_checkpointing.save(_state(layer), folder)


def load(folder: str, tp: int) -> dict[str, bool]:
    """Whether each tensor of the file is this rank's share, bit for bit."""
    with parallel(tp=tp):
        layer, expected = _build(tp)
        loaded: dict[str, Tensor] = dist_checkpointing.load(_state(layer), folder)
        return {
            name: torch.equal(loaded[f"layer.in_proj.{name}"], x) for name, x in expected.items()
        }
