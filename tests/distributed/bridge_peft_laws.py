"""Run on every rank: Megatron-Bridge's LoRA on in_proj and out_proj of a mixer."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from tests import mamba_mixers
from tests.distributed.bridge import adapted
from tests.distributed.layer_laws import build_layer, randomise_
from tests.distributed.mixer_laws import groups_of_megatron
from tests.mamba_mixers import mamba_config
from tests.parallel import assert_close, group_of_one, make_config, parallel
from tests.parallel import share_of as gdn_share_of

RANK, SCALE = 4, 32 / 4  # Bridge's alpha is 32
OWNER = {"gdn": "self_attention", "mamba2": "mixer"}
TARGETS = ("in_proj", "out_proj")


def share_of(name: str, whole: Tensor, layer: nn.Module) -> Tensor:
    """This tensor-parallel rank's share of a whole parameter."""
    is_gdn = type(layer).__name__ == "GatedDeltaNet"
    return (gdn_share_of if is_gdn else mamba_mixers.share_of)(name, whole, layer)


def build(mixer: str, groups: ProcessGroupCollection, **sizes) -> nn.Module:
    if mixer == "mamba2":
        return mamba_mixers.build(mamba_config(**sizes), groups)
    return build_layer(make_config(**sizes), groups, {})


def with_bridges_lora(layer: nn.Module, folder: str, mixer: str) -> None:
    for target in TARGETS:
        path = f"decoder.layers.0.{OWNER[mixer]}.{target}"
        setattr(layer, target, adapted(folder, "LoRA", getattr(layer, target), path, RANK))


def adapter_share(name: str, whole: Tensor, layer: nn.Module) -> Tensor:
    """This rank's part of an adapter's matrix: A is cut by its columns around ``out_proj``."""
    if name.startswith("in_proj") and "linear_out" in name:
        return share_of("in_proj.weight", whole, layer)
    dim = 1 if name.startswith("out_proj") and "linear_in" in name else 0
    return whole.chunk(layer.tp_group.size(), dim)[layer.tp_group.rank()]


def equals_the_merged_layer(folder: str, mixer: str, tp: int, sequence_parallel: bool) -> None:
    """W + s B A in one layer on one rank; that W and B, A apart, on ``tp`` ranks.

    With G the gradient of the merged weight, that of B is s G A^T and that of A is s B^T G.
    """
    with parallel(tp=tp):
        torch.manual_seed(3)
        one = build(mixer, ProcessGroupCollection(tp=group_of_one(), cp=group_of_one()))
        randomise_(one)
        base = {name: p.detach().clone() for name, p in one.named_parameters()}
        matrices = {}
        for target in TARGETS:
            weight = one.get_parameter(f"{target}.weight")
            matrices[target] = (
                torch.randn(weight.shape[0], RANK) * 0.1,
                torch.randn(RANK, weight.shape[1]) * 0.1,
            )
            b, a = matrices[target]
            with torch.no_grad():
                weight += SCALE * b @ a
        x = torch.randn(32, 2, one.global_dims.hidden_size, requires_grad=True)
        of_y = torch.randn(x.shape)
        y = one(x, None)[0]
        (y * of_y).sum().backward()

        sizes = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
        layer = build(mixer, groups_of_megatron(), **sizes)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share_of(name, base[name], layer))
            layer.requires_grad_(False)
        with_bridges_lora(layer, folder, mixer)
        adapters = {
            f"{target}.{half}": getattr(getattr(layer, target).adapter, half).weight
            for target in TARGETS
            for half in ("linear_out", "linear_in")
        }
        with torch.no_grad():
            for name, parameter in adapters.items():
                b, a = matrices[name.split(".")[0]]
                parameter.copy_(adapter_share(name, b if "linear_out" in name else a, layer))

        mine = slice(None)
        if sequence_parallel:
            mine = torch.arange(len(x)).chunk(tp)[layer.tp_group.rank()]
        x_mine = x.detach()[mine].requires_grad_()
        y_mine = layer(x_mine, None)[0]
        (y_mine * of_y[mine]).sum().backward()

        assert_close("output", y_mine, y[mine], 1e-5)
        assert_close("input gradient", x_mine.grad, x.grad[mine], 1e-5)
        for target, (b, a) in matrices.items():
            of_weight = one.get_parameter(f"{target}.weight").grad
            whole = {
                f"{target}.linear_out": SCALE * of_weight @ a.T,
                f"{target}.linear_in": SCALE * b.T @ of_weight,
            }
            for name, expected in whole.items():
                assert_close(name, adapters[name].grad, adapter_share(name, expected, layer), 1e-5)
        trained = {name for name, p in layer.named_parameters() if p.grad is not None}
        assert trained == {f"{n.replace('.', '.adapter.')}.weight" for n in adapters}, trained
