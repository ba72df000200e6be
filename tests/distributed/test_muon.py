"""Muon orthogonalises matrices of one kind: sections of in_proj by themselves, on 1 and
2 ranks."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    emerging_optimizers,
    get_megatron_optimizer,
    layer_wise_optimizer,
)
from torch import nn

from megatron_gdn.compat.versions import MUON_SPLITS_AS_ATTENTION
from megatron_gdn.mixers.tensor_parallel import check_muon_of_heads
from megatron_gdn.ops.layout import layout_of_in_proj
from tests import parallel
from tests.distributed.layer_laws import randomise_
from tests.distributed.mixers import BY_NAME, build_gdn, build_kda
from tests.parallel import groups_of_megatron
from tests.ranks import on_ranks

pytest.importorskip(
    "emerging_optimizers", reason="Megatron's Muon needs emerging-optimizers"
)
if MUON_SPLITS_AS_ATTENTION.is_present():
    pytest.skip("Muon of this megatron-core knows no sections", allow_module_level=True)
# Megatron's main branch keeps Muon from parameters that ask for it, as Mamba2's in_proj
# does.
READS_USE_MUON = hasattr(emerging_optimizers, "_is_muon_excluded")
OF_MAMBA_LAYERS = ("mamba2", "gdp")
MIXERS = [name for name in BY_NAME if name not in OF_MAMBA_LAYERS or not READS_USE_MUON]
# fp32 products: in Megatron's default, bf16, two wrong updates could round to the same
# weight.
MUON = {
    "momentum": 0.9,
    "nesterov": True,
    "fp32_matmul_prec": "highest",
    "num_ns_steps": 5,
}
STEP = {"lr": 0.05, "weight_decay": 0.1}
STEPS = 2


def settings(layer_wise: str | None) -> dict[str, bool]:
    """Megatron's dev branch reads from its configs what 0.19 is told by a layout."""
    name = "use_layer_wise_param_layout"
    return {name: layer_wise != "lists"} if hasattr(OptimizerConfig, name) else {}


# Matrices of a Kimi Delta Attention with gates of low rank.
GATES = tuple(f"{name}_proj.weight" for name in ("beta", "f_a", "f_b", "g_a", "g_b"))
KINDS = {name: replace(kind, randomise=randomise_) for name, kind in BY_NAME.items()}
KINDS["gdn"] = replace(
    KINDS["gdn"], build=partial(build_gdn, bias=True, conv_bias=True)
)
FULL = {"forget_rank": 0, "output_rank": 0}
PER_HEAD = {
    "per head": partial(build_kda, muon_per_head=True),
    "per head, full gates": partial(build_kda, muon_per_head=True, **FULL),
    "per head, one full gate": partial(build_kda, muon_per_head=True, output_rank=0),
}
KINDS |= {name: replace(KINDS["kda"], build=build) for name, build in PER_HEAD.items()}


def in_parallel(mixer: str, tp: int):
    """One rank's mixer with random weights, and this rank's share of it."""
    kind = KINDS[mixer]
    whole = kind.whole(kind.config())
    share = kind.build(kind.config(tensor_model_parallel_size=tp), groups_of_megatron())
    kind.copy_shares(share, whole)
    return whole, share


def wrapped(layer: nn.Module, layer_wise: str | None) -> DistributedDataParallel:
    """``layer_wise`` as under ``--use-distributed-optimizer``: each matrix has its
    rank."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layer_wise == "buffers",
        **settings(layer_wise),
    )
    layout = None
    if layer_wise == "buffers":
        layer_wise_optimizer.tag_params_for_buffer_routing([layer])
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        layout = layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(layer.parameters()), None, size, config
        )
    return DistributedDataParallel(
        layer.config, config, layer, full_param_layout=layout
    )


def optimizer_of(ddp: nn.Module, bf16: bool, tp_mode: str, layer_wise: str | None):
    config = OptimizerConfig(
        optimizer="muon",
        **STEP,
        **{f"muon_{name}": value for name, value in MUON.items()},
        muon_tp_mode=tp_mode,
        clip_grad=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_layer_wise_distributed_optimizer=layer_wise is not None,
        **settings(layer_wise),
    )
    return get_megatron_optimizer(config, [ddp], config_overrides={})


def alone(weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """A matrix after Muon's steps of it alone, on one rank."""
    parameter = nn.Parameter(weight.detach().clone())
    optimizer = emerging_optimizers.TensorParallelMuon([parameter], **STEP, **MUON)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def each_alone(weight, gradients, widths) -> torch.Tensor:
    sections = zip(*(t.split(list(widths)) for t in (weight, *gradients)), strict=True)
    return torch.cat(
        [alone(weight, list(gradients)) for weight, *gradients in sections]
    )


def rows_of_matrices(mixer: str, name: str, dims, rows: int) -> list[int]:
    """The numbers of rows of the matrices that Muon updates by themselves."""
    layout = layout_of_in_proj(dims)
    if mixer not in PER_HEAD:
        return list(layout.widths) if name == "in_proj.weight" else [rows]
    # Kimi Delta Attention: each head's rows are a matrix
    H, K, V = dims.state_shape[:3]
    G = layout.heads("key")
    of_f, of_g = H * [K], H * [V]
    in_proj = [*2 * G * [K], *H * [V]]
    if "g" in layout.names:
        in_proj += [*of_f, *of_g]
    return {
        "in_proj.weight": in_proj,
        "f_proj.weight": of_f,
        "f_b_proj.weight": of_f,
        "g_proj.weight": of_g,
        "g_b_proj.weight": of_g,
    }.get(name, [rows])


def sections_step_as_if_alone(
    mixer: str, tp: int, tp_mode: str, bf16: bool, layer_wise: str | None = None
) -> None:
    """To the bit, but in the mode "distributed", in which ranks add up parts of the
    products."""
    same = close if tp_mode == "distributed" else same_bits
    with parallel.parallel(tp=tp):
        whole, share = in_parallel(mixer, tp)
        if bf16:
            whole = whole.bfloat16()
            share = share.bfloat16()
        ddp = wrapped(share, layer_wise)
        optimizer = optimizer_of(ddp, bf16, tp_mode, layer_wise)
        torch.manual_seed(11)
        gradients = [
            {name: torch.randn(p.shape) for name, p in whole.named_parameters()}
            for _ in range(STEPS)
        ]
        for gradient in gradients:
            for name, parameter in share.named_parameters():
                parameter.main_grad.copy_(
                    KINDS[mixer].share(name, gradient[name], share)
                )
            optimizer.step()
        for name, parameter in share.named_parameters():
            if not name.endswith("_proj.weight"):
                continue
            matrices = [
                whole.get_parameter(name).float(),
                *(g[name] for g in gradients),
            ]
            dims = whole.dims
            # Megatron's default: each rank's share is a matrix
            if tp_mode == "blockwise":
                matrices = [
                    KINDS[mixer].share(name, matrix, share) for matrix in matrices
                ]
                dims = share.dims
            weight, *of_weight = matrices
            widths = rows_of_matrices(mixer, name, dims, len(weight))
            expected = each_alone(weight, of_weight, widths)
            if tp_mode != "blockwise":
                expected = KINDS[mixer].share(name, expected, share)
            same(name, parameter, expected.to(parameter.dtype))
            if hasattr(parameter, "main_param"):
                same(f"master of {name}", parameter.main_param, expected)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for name, parameter in share.named_parameters():
            replicas = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(replicas, parameter.detach(), group=group)
            for replica in replicas:
                same_bits(f"{name} on another rank", replica, parameter)


def same_bits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    off = (actual - expected).abs().max().item()
    assert torch.equal(actual, expected), (
        f"{name}: {off:.3e} after steps of {STEP['lr']}"
    )


def close(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    parallel.assert_close(name, actual, expected, 1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "tp, tp_mode", [(1, "duplicated"), (2, "duplicated"), (2, "blockwise")]
)
@pytest.mark.parametrize("mixer", MIXERS)
def test_each_section_takes_its_own_muon_step(pools, mixer, tp, tp_mode, bf16):
    pools(2).run(sections_step_as_if_alone, mixer, tp, tp_mode, bf16)


@pytest.mark.each_value
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "tp, tp_mode", [(1, "duplicated"), (1, "distributed"), (2, "blockwise")]
)
@pytest.mark.parametrize("kind", PER_HEAD)
def test_each_head_takes_its_own_muon_step(pools, kind, tp, tp_mode, bf16):
    pools(2).run(sections_step_as_if_alone, kind, tp, tp_mode, bf16)


LAUNCH = "megatron_gdn.mixers.tensor_parallel.launch_arguments"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"muon_tp_mode": "duplicated"}, "mode duplicated: .*mode blockwise"),
        ({"muon_tp_mode": "distributed"}, "mode distributed: .*mode blockwise"),
        (
            {"muon_tp_mode": "blockwise", "muon_split_qkv": False},
            "--muon-no-split-qkv contradict",
        ),
    ],
)
@on_ranks(tp=2)
def test_settings_of_muon_that_join_heads_are_refused(settings, said):
    build = KINDS["per head"].build
    config = KINDS["per head"].config(tensor_model_parallel_size=2)
    groups = groups_of_megatron()
    muon = patch(LAUNCH, lambda: {"optimizer": "muon", **settings})
    with muon, pytest.raises(ValueError, match=said):
        build(config, groups)
    blockwise = {"optimizer": "muon", "muon_tp_mode": "blockwise"}
    for legal in ({"optimizer": "adam", **settings}, blockwise):
        with patch(LAUNCH, lambda legal=legal: legal):
            build(config, groups)


@on_ranks(tp=2)
def test_without_a_launch_the_log_says_what_heads_need():
    logged = []
    with patch(f"{LAUNCH.rpartition('.')[0]}.log_once", lambda *a: logged.append(a[0])):
        for ranks in (1, 2):
            check_muon_of_heads(ranks)
    (line,) = logged
    assert "muon_tp_mode='blockwise'" in line


def test_it_does_so_where_ranks_add_up_their_parts_of_the_products(pools):
    pools(2).run(sections_step_as_if_alone, "gdn", 2, "distributed", False)


@pytest.mark.each_value
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layer_wise", ["buffers", "lists"])
def test_it_does_so_where_data_parallel_ranks_share_the_optimizer(
    pools, layer_wise, ranks
):
    """Two parameters are fp32: of four ranks some have 16-bit ones alone."""
    pools(ranks).run(
        sections_step_as_if_alone, "gdn", 1, "duplicated", True, layer_wise
    )


FP32 = torch.float32
HALF = torch.bfloat16


@pytest.mark.parametrize(
    "dealt",
    [
        ([FP32, HALF], [HALF, FP32]),
        ([FP32], [HALF, FP32]),
        ([FP32], [HALF]),
        ([HALF], [FP32]),
        ([], [HALF, FP32]),
        ([FP32], [FP32]),
        ([HALF], [HALF]),
    ],
    ids=str,
)
@on_ranks(2, cp=1)
def test_every_rank_gets_every_parameter_whoever_steps_it(dealt):
    """``dealt``: the dtypes of the parameters that each rank steps. Those of one dtype
    are gathered by Megatron."""
    _, layer = in_parallel("gdn", 1)
    optimizer = optimizer_of(wrapped(layer, "lists"), True, "duplicated", "lists")
    rank = dist.get_rank()
    held = [
        [nn.Parameter(torch.full((3,), float(r == rank)).to(dtype)) for dtype in dtypes]
        for r, dtypes in enumerate(dealt)
    ]
    optimizer.dp_cp_params_list = held
    with patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        optimizer.allgather_params()
    assert all(p.eq(1).all() for parameters in held for p in parameters)
    assert optimizer.dp_cp_params_list is held
    if dealt[0] == dealt[1]:
        assert not broadcast.called


@pytest.mark.parametrize("mixer", BY_NAME)
@on_ranks(2, cp=1)
def test_what_is_no_matrix_is_adams(mixer):
    expected = {"in_proj.weight", "out_proj.weight"}
    if mixer == "kda":
        expected |= {*GATES}
    if mixer in OF_MAMBA_LAYERS and READS_USE_MUON:
        expected = {"out_proj.weight"}
    _, layer = in_parallel(mixer, 1)
    optimizer = optimizer_of(wrapped(layer, None), False, "duplicated", None)
    muon, adam = (
        {
            id(parameter)
            for one in optimizer.chained_optimizers
            if isinstance(one.optimizer, emerging_optimizers.TensorParallelMuon)
            is of_muon
            for group in one.optimizer.param_groups
            for parameter in group["params"]
        }
        for of_muon in (True, False)
    )
    names = {name: id(parameter) for name, parameter in layer.named_parameters()}
    assert muon | adam == set(names.values()) and not muon & adam
    assert {name for name, parameter in names.items() if parameter in muon} == expected


@on_ranks(4)
def test_what_muon_gathers_may_differ_in_size_over_gloo():
    """Rank 0 holds nothing."""
    pair = dist.new_group([1, 3])
    for group, members in ((None, (0, 1, 2, 3)), (pair, (1, 3))):
        if dist.get_rank() not in members:
            continue
        own = [torch.full((rank, 2), rank) for rank in members]
        for async_op in (False, True):
            gathered = [torch.full_like(x, -1) for x in own]
            work = dist.all_gather(gathered, own[dist.get_rank(group)], group, async_op)
            assert (work is None) != async_op
            if work is not None:
                work.wait()
            assert all(map(torch.equal, gathered, own))
