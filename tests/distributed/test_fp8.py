"""in_proj in FP8 with the rule's gates in the weights' dtype, on 1 and 2 ranks."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn import (
    GatedDeltaProduct,
    GatedDeltaProductSubmodules,
    Mamba2Mixer,
    Mamba2MixerSubmodules,
    tree_packed_seq_params,
)
from megatron_gdn.compat.torch_linear import DuplicatedLinear
from megatron_gdn.mixers.fp8 import GatesOutsideFP8, SectionOutsideFP8
from megatron_gdn.specs import (
    gated_delta_net2_spec,
    gated_delta_net_spec,
    kimi_delta_attention_spec,
)
from tests import fp8_twin, parallel
from tests.distributed.layer_laws import randomise_, thd
from tests.distributed.mixer_laws import in_a_shared_folder
from tests.distributed.mixers import BY_NAME
from tests.fp8_twin import Fp8Column, Fp8Duplicated, Fp8NormedColumn, fp8_on, rounded
from tests.parallel import alone, assert_close, groups_of_megatron, in_ddp, make_config
from tests.ranks import on_ranks

each = pytest.mark.parametrize("mixer", ["gdn", "gdn2", "gdp", "mamba2"])
by_tp = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
TOKENS = 16
BATCH = 2
OF_MAMBA_LAYERS = {
    "gdp": (GatedDeltaProduct, GatedDeltaProductSubmodules),
    "mamba2": (Mamba2Mixer, Mamba2MixerSubmodules),
}
# Multiples of 16 before the gates, and of out_proj's input, on two ranks.
MAMBA = {
    "mamba_head_dim": 8,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
    "mamba_num_heads": 8,
}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
# Sums of 24 products in fp32, in another order on each path.
FP32 = 1e-5


def build(mixer: str, config, groups, linear=Fp8Column, **options):
    if mixer in OF_MAMBA_LAYERS:
        kind, submodules_class = OF_MAMBA_LAYERS[mixer]
        submodules = submodules_class(in_proj=linear, out_proj=RowParallelLinear)
        return kind(
            config, submodules, config.hidden_size, pg_collection=groups, **options
        )
    spec_of = gated_delta_net2_spec if mixer == "gdn2" else gated_delta_net_spec
    spec = spec_of("local", **options)
    spec.submodules.in_proj = linear
    return build_module(spec, config, layer_number=1, pg_collection=groups)


def whole(mixer: str, linear=Fp8Column, fp8: bool = True, **options):
    """On this rank alone, the same on all."""
    torch.manual_seed(7)
    layer = build(
        mixer, make_config(**MAMBA, **(FP8 if fp8 else {})), alone(), linear, **options
    )
    randomise_(layer)
    return layer


def share(mixer: str, of, linear, sequence_parallel: bool):
    """This rank's share of the mixer ``of``."""
    sizes = {**MAMBA, **FP8, "tensor_model_parallel_size": 2}
    config = make_config(**sizes, sequence_parallel=sequence_parallel)
    layer = build(mixer, config, groups_of_megatron(), linear)
    share_of = BY_NAME[mixer].share
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "layer_norm" in name:
                parameter.copy_(of.get_parameter(name))
            else:
                parameter.copy_(share_of(name, of.get_parameter(name), layer))
    return layer, share_of


def inputs(layer, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, BATCH, layer.config.hidden_size, generator=generator)


def unrounded():
    """FP8 has other scales on other ranks: its products are those of unrounded
    numbers."""
    return patch.object(fp8_twin, "rounded", lambda x, dtype=None: x.float())


def rows_of_rank(layer, sequence_parallel: bool) -> slice:
    rank = layer.tp_group.rank()
    per_rank = TOKENS // 2
    return (
        slice(rank * per_rank, (rank + 1) * per_rank)
        if sequence_parallel
        else slice(None)
    )


def gradients(layer, x, *, main_grad: bool = False, times: int = 1, rows=slice(None)):
    """Of the layer's parameters and input; ``main_grad``: from the fp32 buffers."""
    linear = layer.in_proj
    x = x.detach().requires_grad_()
    linear.fuse_wgrad_accumulation = main_grad
    layer.zero_grad()
    if main_grad:
        linear.weight.main_grad = torch.zeros_like(linear.weight)
        linear.weight.grad_added_to_main_grad = False
    for _ in range(times):
        with fp8_on():
            out, _ = layer(x)
        out.backward(inputs(layer, 6)[rows])
    found = {name: p.grad for name, p in layer.named_parameters()}
    if main_grad:
        assert linear.weight.grad_added_to_main_grad
        found["in_proj.weight"] = linear.weight.main_grad
    return {"x": x.grad, **found}


def _joins(layer, cat) -> bool:
    """Whether a patched ``torch.cat`` joined rows and gates."""
    width = layer.dims.layout.main_width
    return any(call.args[0][0].shape[-1] == width for call in cat.call_args_list)


@pytest.mark.parametrize(
    ("mixer", "bias"),
    [
        ("gdn", False),
        ("gdn", True),
        ("gdn2", False),
        ("gdp", True),
        ("mamba2", False),
    ],
)
@on_ranks(2)
def test_gates_have_the_weights_dtype_and_the_rest_is_fp8(mixer, bias):
    layer = whole(mixer, **({"bias": True} if bias else {}))
    linear = layer.in_proj
    x = inputs(layer)
    exact, _ = linear(x)
    with fp8_on():
        rows, _ = linear(x)
    first = layer.dims.layout.main_width
    main = rounded(x) @ rounded(linear.weight[:first].detach()).t()
    if bias:
        main = main + linear.bias[:first]
    assert_close("main", rows[..., :first], main, FP32)
    assert_close("gates", rows[..., first:], exact[..., first:], FP32)
    assert not torch.equal(rows[..., :first], exact[..., :first])


@each
@on_ranks(2)
def test_gradients_of_gates_do_not_pass_fp8(mixer):
    layer = whole(mixer)
    linear = layer.in_proj
    first = layer.dims.layout.main_width
    x = inputs(layer).requires_grad_()
    with fp8_on():
        rows, _ = linear(x)
    d_gates = torch.randn(rows.shape[:2] + (rows.shape[2] - first,))
    rows.backward(torch.cat([torch.zeros_like(rows[..., :first]), d_gates], -1))
    exact = d_gates.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    assert_close("weight", linear.weight.grad[first:], exact, FP32)
    assert not linear.weight.grad[:first].any()
    assert_close("x", x.grad, d_gates @ linear.weight.detach()[first:], FP32)


@pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "1+gamma"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@on_ranks(2)
def test_the_norm_in_front_comes_once(normalization, zero_centered):
    """All columns and every gradient, against the linear without FP8; products are
    unrounded."""
    layer = whole("gdn", Fp8NormedColumn)
    linear = layer.in_proj
    linear.normalization = normalization
    linear.zero_centered_gamma = zero_centered
    linear.eps = 0.5  # so large that it shows beside squares of about 9
    if normalization == "LayerNorm":
        linear.layer_norm_bias = torch.nn.Parameter(torch.randn(linear.weight.shape[1]))
    found = []
    d_rows = torch.randn(TOKENS, BATCH, linear.weight.shape[0])
    for fp8 in (False, True):
        x = (3 * inputs(layer)).requires_grad_()
        linear.zero_grad()
        with fp8_on() if fp8 else nullcontext(), unrounded():
            rows, _ = linear(x)
            rows.backward(d_rows)
        gradients = {name: p.grad.clone() for name, p in linear.named_parameters()}
        found.append({"rows": rows, "x": x.grad, **gradients})
    for name, tensor in found[0].items():
        assert_close(name, found[1][name], tensor, FP32)


@each
@on_ranks(2)
def test_both_parts_add_their_rows_of_main_grad_in_place(mixer):
    """And so do the gates; two micro-batches add up."""
    layer = whole(mixer, Fp8NormedColumn)
    once = gradients(layer, inputs(layer))
    assert once["in_proj.weight"].isfinite().all()
    twice = gradients(layer, inputs(layer), main_grad=True, times=2)
    assert_close("main_grad", twice["in_proj.weight"], 2 * once["in_proj.weight"], FP32)


@each
@on_ranks(2, tp=1)
def test_megatrons_ddp_gets_both_parts(mixer):
    """In its buffers, at the end of the backward, with and without fused
    accumulation."""
    found = []
    for fused in (True, False):
        layer = whole(mixer)
        ddp = in_ddp(
            layer, grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=None
        )
        layer.in_proj.fuse_wgrad_accumulation = fused
        ddp.zero_grad_buffer()
        with fp8_on():
            out, _ = ddp(inputs(layer))
        out.sum().backward()
        ddp.finish_grad_sync()
        found.append(
            {name: p.main_grad.clone() for name, p in layer.named_parameters()}
        )
    for name, gradient in found[0].items():
        assert gradient.any(), name
        assert_close(name, gradient, found[1][name], FP32)


@pytest.mark.each_value
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@by_tp
@pytest.mark.parametrize("normed", [False, True], ids=["linear", "norm+linear"])
@each
@on_ranks(tp=2)
def test_ranks_share_the_gates(mixer, normed, sequence_parallel, main_grad):
    """Against one rank, with unrounded products."""
    linear = Fp8NormedColumn if normed else Fp8Column
    with unrounded():
        of = whole(mixer, linear)
        layer, share_of = share(mixer, of, linear, sequence_parallel)
        x = inputs(of)
        mine = rows_of_rank(layer, sequence_parallel)
        expected = gradients(of, x, main_grad=main_grad)
        with fp8_on():
            assert_close("out", layer(x[mine])[0], of(x)[0][mine], FP32)
        found = gradients(layer, x[mine], main_grad=main_grad, rows=mine)
    assert_close("x", found["x"], expected["x"][mine], FP32)
    whole_grad = share_of("in_proj.weight", expected["in_proj.weight"], layer)
    assert_close("in_proj", found["in_proj.weight"], whole_grad, FP32)
    if "in_proj.layer_norm_weight" in expected:
        gamma = found["in_proj.layer_norm_weight"]
        if sequence_parallel:  # Megatron sums it over the ranks
            dist.all_reduce(gamma, group=layer.tp_group)
        assert_close("gamma", gamma, expected["in_proj.layer_norm_weight"], FP32)


@by_tp
@on_ranks(tp=2)
def test_an_adapter_gets_the_normed_rows(sequence_parallel):
    """Those of all ranks where it asks for them, with the whole gradient."""
    of = whole("gdn", Fp8NormedColumn)
    layer, _ = share("gdn", of, Fp8NormedColumn, sequence_parallel)
    x = inputs(of)
    mine = rows_of_rank(layer, sequence_parallel)
    linear = layer.in_proj
    linear.return_layernorm_output = linear.return_layernorm_output_gathered = True
    with fp8_on():
        (rows, normed), _ = linear(x[mine])
    assert rows.shape == (TOKENS, BATCH, layer.dims.layout.width)
    assert normed.shape == x.shape
    expected = torch.nn.functional.rms_norm(
        x, x.shape[-1:], linear.layer_norm_weight, 1e-6
    )
    assert_close("normed", normed, expected, FP32)


@each
@on_ranks(2, tp=1)
def test_files_and_marks_are_those_of_a_launch_without_fp8(mixer):
    """Keys, bits and initial values; what optimizers and Muon read on the parameter."""
    plain = whole(mixer, fp8=False)
    fp8 = whole(mixer)
    assert type(fp8.in_proj).__name__ == type(plain.in_proj).__name__
    assert isinstance(fp8.in_proj, GatesOutsideFP8) and not isinstance(
        plain.in_proj, GatesOutsideFP8
    )
    assert isinstance(fp8.in_proj, ColumnParallelLinear)
    ours = fp8.state_dict()
    theirs = plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(x, theirs[name]) for name, x in ours.items() if x is not None
    )
    marks = [vars(layer.in_proj.weight) for layer in (fp8, plain)]
    assert marks[0] == marks[1]
    sharded = [layer.sharded_state_dict("a.") for layer in (fp8, plain)]
    assert sharded[0].keys() == sharded[1].keys()
    out, _ = fp8(inputs(fp8))
    expected, _ = plain(inputs(fp8))
    assert torch.equal(out, expected)  # outside of Megatron's FP8 context
    fp8.load_state_dict(theirs)
    with fp8_on():
        assert not torch.equal(fp8(inputs(fp8))[0], expected)


@each
@on_ranks(2)
def test_a_checkpoint_moves_between_fp8_and_bf16(mixer):
    """From two ranks in FP8 to one that is not, and back: each weight to the bit, by
    all keys."""

    def load(layer, folder: str) -> None:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        every = StrictHandling.RAISE_ALL
        state = dist_checkpointing.load(
            layer.sharded_state_dict(), folder, strict=every
        )
        layer.load_state_dict(state)

    def there_and_back(folder: str, other: str) -> None:
        with parallel.parallel(tp=2):
            of = whole(mixer)
            layer, share_of = share(mixer, of, Fp8Column, False)
            dist_checkpointing.save(layer.sharded_state_dict(), folder)
        with parallel.parallel(tp=1):
            plain = whole(mixer, fp8=False)
            load(plain, folder)
            assert not isinstance(plain.in_proj, GatesOutsideFP8)
            for name, parameter in plain.named_parameters():
                assert torch.equal(parameter, of.get_parameter(name)), name
            dist_checkpointing.save(plain.sharded_state_dict(), other)
        with parallel.parallel(tp=2):
            layer, _ = share(mixer, of, Fp8Column, False)
            load(layer, other)
            for name, parameter in layer.named_parameters():
                assert torch.equal(
                    parameter, share_of(name, of.get_parameter(name), layer)
                ), name

    in_a_shared_folder(
        lambda one: in_a_shared_folder(lambda two: there_and_back(one, two))
    )


DOCUMENTS = {
    "batch": None,
    "packed": thd([3, 0, TOKENS - 3]),
    "tree": tree_packed_seq_params([5, 4, TOKENS - 9], [-1, 0, 0], device="cpu"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("documents", DOCUMENTS)
@each
@on_ranks(2, tp=1)
def test_gates_beside_the_rows_are_gates_in_the_rows(mixer, documents):
    """Output and gradients to the bit, and no copy of the rows is made."""
    layer = whole(mixer, Fp8NormedColumn)
    boundaries = DOCUMENTS[documents]
    found = []
    joined = []
    for together in (True, False):
        layer.in_proj.__dict__.pop("forward", None)
        if together:
            forward = layer.in_proj.forward
            layer.in_proj.forward = lambda x, together=None, of=forward: of(x)
        x = inputs(layer)[:, : 1 if boundaries else BATCH].detach().requires_grad_()
        layer.zero_grad()
        with fp8_on(), patch.object(torch, "cat", side_effect=torch.cat) as cat:
            out, _ = layer(x, packed_seq_params=boundaries)
        joined.append(_joins(layer, cat))
        out.backward(inputs(layer, 6)[:, : out.shape[1]])
        found.append(
            {
                "out": out,
                "x": x.grad,
                **{n: p.grad for n, p in layer.named_parameters()},
            }
        )
    assert joined == [True, False]
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


@each
@on_ranks(2)
def test_where_rows_must_be_whole_they_are_joined(mixer):
    """On the grid of batch-invariant mode."""
    layer = whole(mixer, Fp8NormedColumn)
    x = inputs(layer)
    with fp8_on():
        expected, _ = layer(x)
        layer.config.batch_invariant_mode = True
        layer.config = layer.config
        found, _ = layer(x)
    assert_close("aligned", found, expected, FP32)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@each
@on_ranks(cp=2)
def test_context_parallel_ranks_equal_one(mixer, mode):
    """Chunkwise without a copy of the rows."""
    with unrounded():
        of = whole(mixer, Fp8NormedColumn)
        config = make_config(**MAMBA, **FP8, context_parallel_size=2)
        groups = groups_of_megatron()
        options = {"linear_cp_mode": mode, "cp_layout": "contiguous"}
        layer = build(mixer, config, groups, Fp8NormedColumn, **options)
        layer.load_state_dict(of.state_dict())
        rank = groups.cp.rank()
        mine = slice(rank * (TOKENS // 2), (rank + 1) * (TOKENS // 2))
        found = []
        for one, tokens in ((of, slice(None)), (layer, mine)):
            x = inputs(of)[tokens].detach().requires_grad_()
            with fp8_on(), patch.object(torch, "cat", side_effect=torch.cat) as cat:
                out, _ = one(x)
            out.backward(inputs(of, 6)[tokens])
            found.append({"out": out, "x": x.grad, "weight": one.in_proj.weight.grad})
            found[-1]["joined"] = _joins(one, cat)
    assert found[1].pop("joined") == (mode == "headwise")
    dist.all_reduce(found[1]["weight"], group=groups.cp)
    for name, tensor in found[1].items():
        assert_close(
            name,
            tensor,
            found[0][name][mine if name != "weight" else slice(None)],
            FP32,
        )


RANKS = {"low rank": {"forget_rank": 4, "output_rank": 16}, "full": {}}
gates = pytest.mark.parametrize("ranks", RANKS)


def kda_in_fp8(config, groups, ranks):
    spec = kimi_delta_attention_spec("local", **RANKS[ranks])
    for place, linear in vars(spec.submodules).items():
        if linear is ColumnParallelLinear:
            setattr(spec.submodules, place, Fp8Column)
        if linear is DuplicatedLinear:
            setattr(spec.submodules, place, Fp8Duplicated)
    return build_module(spec, config, layer_number=1, pg_collection=groups)


def whole_kda(ranks, fp8: bool = True):
    """On this rank alone, the same on all."""
    torch.manual_seed(7)
    layer = kda_in_fp8(make_config(**(FP8 if fp8 else {})), alone(), ranks)
    randomise_(layer)
    return layer


@pytest.mark.each_pair
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@gates
@by_tp
@on_ranks(tp=2)
def test_ranks_share_kimi_delta_attention(sequence_parallel, ranks, main_grad):
    """Against one rank, with unrounded products."""
    with unrounded():
        of = whole_kda(ranks)
        sizes = {"tensor_model_parallel_size": 2, **FP8}
        config = make_config(**sizes, sequence_parallel=sequence_parallel)
        layer = kda_in_fp8(config, groups_of_megatron(), ranks)
        share_of = BY_NAME["kda"].share
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share_of(name, of.get_parameter(name), layer))
        x = inputs(of)
        mine = rows_of_rank(layer, sequence_parallel)
        expected = gradients(of, x, main_grad=main_grad)
        with fp8_on():
            assert_close("out", layer(x[mine])[0], of(x)[0][mine], FP32)
        found = gradients(layer, x[mine], main_grad=main_grad, rows=mine)
    assert_close("x", found.pop("x"), expected["x"][mine], FP32)
    for name, gradient in found.items():
        if getattr(layer.get_parameter(name), "sequence_parallel", False):
            # Megatron sums it over the ranks
            dist.all_reduce(gradient, group=layer.tp_group)
        assert_close(name, gradient, share_of(name, expected[name], layer), FP32)


@on_ranks(2, tp=1)
def test_megatrons_ddp_gets_all_three_products_of_full_gates():
    """In its buffers, at the end of the backward, with and without fused accumulation;
    two micro-batches add up."""
    found = []
    for fused in (True, False):
        layer = whole_kda("full")
        ddp = in_ddp(
            layer, grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=None
        )
        layer.in_proj.fuse_wgrad_accumulation = fused
        ddp.zero_grad_buffer()
        for last in (False, True):
            with fp8_on(), nullcontext() if last else ddp.no_sync():
                out, _ = ddp(inputs(layer))
            out.sum().backward()
        ddp.finish_grad_sync()
        found.append(
            {name: p.main_grad.clone() for name, p in layer.named_parameters()}
        )
    for name, gradient in found[0].items():
        assert gradient.any(), name
        assert_close(name, gradient, found[1][name], FP32)


@gates
@on_ranks(2, tp=1)
def test_files_of_kimi_delta_attention_are_those_of_a_launch_without_fp8(ranks):
    plain = whole_kda(ranks, fp8=False)
    fp8 = whole_kda(ranks)
    assert type(fp8.in_proj).__name__ == type(plain.in_proj).__name__
    assert isinstance(fp8.in_proj, SectionOutsideFP8) is (ranks == "full")
    ours = fp8.state_dict()
    theirs = plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(x, theirs[name]) for name, x in ours.items() if x is not None
    )
    assert vars(fp8.in_proj.weight) == vars(plain.in_proj.weight)
    sharded = [layer.sharded_state_dict("a.") for layer in (fp8, plain)]
    assert sharded[0].keys() == sharded[1].keys()
    out, _ = fp8(inputs(fp8))
    expected, _ = plain(inputs(fp8))
    assert torch.equal(out, expected)  # outside of Megatron's FP8 context
    with fp8_on():
        assert not torch.equal(fp8(inputs(fp8))[0], expected)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@on_ranks(cp=2)
def test_context_parallel_ranks_share_full_gates(mode):
    with unrounded():
        of = whole_kda("full")
        config = make_config(**FP8, context_parallel_size=2)
        groups = groups_of_megatron()
        spec = {"linear_cp_mode": mode, "cp_layout": "contiguous"}
        with patch.dict(RANKS, full=spec):
            layer = kda_in_fp8(config, groups, "full")
        layer.load_state_dict(of.state_dict())
        rank = groups.cp.rank()
        mine = slice(rank * (TOKENS // 2), (rank + 1) * (TOKENS // 2))
        expected = gradients(of, inputs(of))
        found = gradients(layer, inputs(of)[mine], rows=mine)
    assert_close("x", found.pop("x"), expected["x"][mine], FP32)
    for name, gradient in found.items():
        dist.all_reduce(gradient, group=groups.cp)
        assert_close(name, gradient, expected[name], FP32)
