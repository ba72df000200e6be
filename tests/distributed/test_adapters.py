"""Adapters around in_proj (LoRA, DoRA) load at every tensor-parallel size."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from megatron_gdn.mixers.tensor_map import take_share
from megatron_gdn.ops.layout import layout_of_in_proj
from tests.distributed.mixers import BY_NAME, FULL_GATES, KDA_FP32
from tests.distributed.model_laws import metadata
from tests.parallel import groups_of_megatron, parallel
from tests.ranks import on_ranks

RANK = 4
KINDS = BY_NAME | {
    "kda_full": replace(KDA_FP32, build=partial(KDA_FP32.build, **FULL_GATES))
}
MIXERS = ("gdn", "gdn2", "gdp", "mamba2", "kda", "kda_full")


def sharded(module: nn.Module, names, prefix: str, *given) -> dict:
    """What these submodules store, under their names."""
    state = {}
    for name in names:
        state |= module.get_submodule(name).sharded_state_dict(
            f"{prefix}{name}.", *given
        )
    return state


class Adapter(nn.Module):
    """D -> RANK -> P between two of Megatron's linears, and DoRA's magnitude
    ``[P]``."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()

        def column(rows: int, columns: int, gather: bool) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                rows,
                columns,
                config=linear.config,
                bias=False,
                gather_output=gather,
                init_method=nn.init.xavier_normal_,
                tp_group=linear.tp_group,
            )

        self.linear_in = column(linear.input_size, RANK, gather=True)
        self.linear_out = column(RANK, linear.output_size, gather=False)
        self.weight_magnitude = nn.Parameter(
            torch.zeros(linear.output_size_per_partition)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_out(self.linear_in(x)[0])[0] * self.weight_magnitude

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        key = f"{prefix}weight_magnitude"
        magnitude = make_tp_sharded_tensor_for_checkpoint(
            self.weight_magnitude,
            key,
            0,
            prepend_offsets=sharded_offsets,
            tp_group=self.linear_out.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        names = ("linear_in", "linear_out")
        return {
            key: magnitude,
            **sharded(self, names, prefix, sharded_offsets, metadata),
        }


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
            **self.adapter.sharded_state_dict(
                f"{prefix}adapter.", sharded_offsets, metadata
            ),
        }


class PeftAdapted(nn.Module):
    """With the names of peft, as mcore-bridge's."""

    def __init__(self, linear) -> None:
        super().__init__()
        adapter = Adapter(linear)
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": adapter.linear_in})
        self.lora_B = nn.ModuleDict({"default": adapter.linear_out})

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        names = ("base_layer", "lora_A.default", "lora_B.default")
        return sharded(self, names, prefix, sharded_offsets, metadata)


def _build(mixer: str, tp: int, kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A layer, and this rank's share of what its adapter holds."""
    torch.manual_seed(11)
    mixers = KINDS[mixer]
    layer = mixers.build(
        mixers.config(tensor_model_parallel_size=tp), groups_of_megatron()
    )
    rows = layout_of_in_proj(layer.global_dims).widths
    columns = layer.global_dims.hidden_size
    if kind == "names of peft":
        layer.in_proj = PeftAdapted(layer.in_proj)
        names = "lora_A.default.weight", "lora_B.default.weight"
        more = {"base_layer.weight": (rows, columns)}
    else:
        layer.in_proj = Adapted(layer.in_proj)
        names = "adapter.linear_in.weight", "adapter.linear_out.weight"
        more = {"adapter.weight_magnitude": (rows,)}
    sizes = {names[0]: ((RANK,), columns), names[1]: (rows, RANK), **more}
    values = {
        name: take_share(torch.randn(sum(cut), *n), 0, cut, layer.tp_group.rank(), tp)
        for name, (cut, *n) in sizes.items()
    }
    return layer, values


def _state(layer: nn.Module, names, as_bridge_alone: bool = False) -> dict:
    """Of the adapter; as Bridge stores it around a layer that knows of no adapters."""
    if as_bridge_alone:
        state = layer.in_proj.sharded_state_dict("layer.in_proj.", (), metadata())
    else:
        state = layer.sharded_state_dict("layer.", metadata=metadata())
    return {key: state[key] for key in (f"layer.in_proj.{name}" for name in names)}


class SplitsItself(Adapted):
    """Whose adapter gives a factory of its own, as Bridge's do for some linears."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        key = f"{prefix}adapter.linear_out.weight"
        rows = state[key].data.shape[0]
        self.own = _split_tensor_factory(state[key], [2, rows - 2], ["a", "b"], 0)
        return state | {key: self.own}


@pytest.mark.parametrize("mixer", MIXERS)
@on_ranks(1, tp=1)
def test_what_an_adapter_splits_itself_is_left_as_it_is(mixer):
    layer, _ = _build(mixer, 1, "by sections")
    layer.in_proj = SplitsItself(layer.in_proj.to_wrap)
    state = layer.sharded_state_dict("layer.", metadata=metadata())
    assert state["layer.in_proj.adapter.linear_out.weight"] is layer.in_proj.own


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["by sections", "whole", "names of peft"])
@pytest.mark.parametrize("mixer", MIXERS)
@on_ranks(2)
def test_an_adapter_of_two_ranks_is_the_same_adapter_on_one_and_two(
    tmp_path, mixer, kind
):
    """Files by sections, and files with whole rows that were written without this
    package."""
    with parallel(tp=2):
        layer, values = _build(mixer, 2, kind)
        layer.in_proj.load_state_dict(values, strict=False)
        dist_checkpointing.save(_state(layer, values, kind == "whole"), str(tmp_path))
    for tp in (1, 2):
        with parallel(tp=tp):
            layer, values = _build(mixer, tp, kind)
            for parameter in layer.in_proj.parameters():
                nn.init.constant_(parameter, float("nan"))
            loaded = dist_checkpointing.load(_state(layer, values), str(tmp_path))
            for name, value in values.items():
                assert torch.equal(loaded[f"layer.in_proj.{name}"], value), (name, tp)
