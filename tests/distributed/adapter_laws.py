"""Run on every rank: low-rank adapters around ``in_proj``, Megatron-Bridge's and ones like them."""

import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megatron_gdn.mixers.init import take_share
from tests import mamba_mixers
from tests.distributed.bridge import adapted
from tests.distributed.layer_laws import build_layer
from tests.distributed.mixer_laws import groups_of_megatron
from tests.distributed.model_laws import metadata
from tests.mamba_mixers import mamba_config
from tests.parallel import make_config, parallel

RANK = 4


class Adapter(nn.Module):
    """D -> RANK -> P between two of Megatron's linears, and DoRA's magnitude ``[P]``."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()

        def column(rows: int, columns: int, gather: bool) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                rows, columns, config=linear.config, bias=False, gather_output=gather,
                init_method=nn.init.xavier_normal_, tp_group=linear.tp_group,
            )  # fmt: skip

        self.linear_in = column(linear.input_size, RANK, gather=True)
        self.linear_out = column(RANK, linear.output_size, gather=False)
        self.weight_magnitude = nn.Parameter(torch.zeros(linear.output_size_per_partition))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_out(self.linear_in(x)[0])[0] * self.weight_magnitude

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        key = f"{prefix}weight_magnitude"
        magnitude = make_tp_sharded_tensor_for_checkpoint(
            self.weight_magnitude, key, 0, prepend_offsets=sharded_offsets,
            tp_group=self.linear_out.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        parts = [
            getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
            for name in ("linear_in", "linear_out")
        ]
        return {key: magnitude, **parts[0], **parts[1]}


class Adapted(nn.Module):
    """A linear and its adapter; the linear keeps its place in state dicts."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.to_wrap, self.adapter = linear, Adapter(linear)

    def forward(self, x: Tensor):
        rows, bias = self.to_wrap(x)
        return rows + self.adapter(x), bias

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {
            **self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata),
            **self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata),
        }


def _build(mixer: str, tp: int, bridge: tuple[str, str] | None = None) -> nn.Module:
    """``bridge``: its folder and its class of adapters; None for ours."""
    torch.manual_seed(11)
    if mixer == "mamba2":
        config = mamba_config(tensor_model_parallel_size=tp)
        layer = mamba_mixers.build(config, groups_of_megatron())
    else:
        config = make_config(tensor_model_parallel_size=tp)
        layer = build_layer(config, groups_of_megatron(), {})
    if bridge is None:
        layer.in_proj = Adapted(layer.in_proj)
    else:
        owner = {"gdn": "self_attention", "mamba2": "mixer"}[mixer]
        path = f"decoder.layers.0.{owner}.in_proj"
        layer.in_proj = adapted(*bridge, layer.in_proj, path, RANK)
    return layer


def _adapter_of_one_rank(layer: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(12)
    rows = layer.global_dims.layout.width
    return {
        "linear_in.weight": torch.randn(RANK, layer.global_dims.hidden_size),
        "linear_out.weight": torch.randn(rows, RANK),
        "weight_magnitude": torch.randn(rows),
    }


def _share(name: str, whole: Tensor, layer: nn.Module) -> Tensor:
    sections = (RANK,) if "linear_in" in name else layer.global_dims.layout.widths
    return take_share(whole, 0, sections, layer.tp_group.rank(), layer.tp_size)


def _state(layer: nn.Module, as_bridge_alone: bool) -> dict:
    """Of the adapter; as Bridge stores it around a layer that knows of no adapters."""
    kind = metadata()
    if as_bridge_alone:
        return layer.in_proj.sharded_state_dict("layer.in_proj.", (), kind)
    return layer.sharded_state_dict("layer.", metadata=kind)


def save(mixer: str, folder: str, tp: int, as_bridge_alone: bool = False, bridge=None) -> None:
    with parallel(tp=tp):
        layer = _build(mixer, tp, bridge)
        whole = _adapter_of_one_rank(layer)
        with torch.no_grad():
            for name, parameter in layer.in_proj.adapter.named_parameters():
                parameter.copy_(_share(name, whole[name], layer))
        state = _state(layer, as_bridge_alone)
        dist_checkpointing.save({k: v for k, v in state.items() if ".adapter." in k}, folder)


def load(mixer: str, folder: str, tp: int, bridge=None) -> dict[str, float]:
    """How far each parameter of the loaded adapter is from its share, relative to its largest."""
    with parallel(tp=tp):
        layer = _build(mixer, tp, bridge)
        whole = _adapter_of_one_rank(layer)
        adapter = layer.in_proj.adapter
        for parameter in adapter.parameters():
            nn.init.constant_(parameter, float("nan"))
        state = _state(layer, as_bridge_alone=False)
        wanted = {k: v for k, v in state.items() if ".adapter." in k}
        loaded = dist_checkpointing.load(wanted, folder)
        before = len("layer.in_proj.adapter.")
        adapter.load_state_dict({key[before:]: value for key, value in loaded.items()}, False)
        return {
            name: ((p - _share(name, whole[name], layer)).abs().max() / p.abs().max()).item()
            for name, p in adapter.named_parameters()
        }
