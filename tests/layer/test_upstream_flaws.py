"""One test per flaw of megatron-core 0.19's own layer; each fails there (see
tests/upstream.py)."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn import GDNDims, SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.tensor_map import take_share
from tests.distributed.layer_laws import thd
from tests.parallel import (
    alone,
    assert_close,
    group_of_one,
    groups_of_megatron,
    in_ddp,
    make_config,
    parallel,
    reduce_gradients,
    share_of_rank,
)
from tests.ranks import on_ranks
from tests.upstream import gdn_module, layer_spec, with_gdn_norm_out


def build(config=None, groups=None, **params):
    groups = groups or groups_of_megatron()
    return build_module(
        layer_spec(**params), config or make_config(), pg_collection=groups
    )


def expected_share(
    name: str, whole: torch.Tensor, rank: int, size: int
) -> torch.Tensor:
    return share_of_rank(name, whole, GDNDims.from_config(make_config()), rank, size)


@on_ranks(tp=2)
def test_replicated_norm_weights_stay_equal_across_tensor_parallel_ranks():
    one = build(groups=alone())
    layer = build(make_config(tensor_model_parallel_size=2))
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(expected_share(name, one.get_parameter(name), rank, 2))
    x = torch.randn(9, 1, 24)
    one(x, None)[0].square().sum().backward()
    ddp = in_ddp(layer)
    ddp(x, None)[0].square().sum().backward()
    reduce_gradients(ddp)
    assert_close(
        "out_norm", layer.out_norm.weight.main_grad, one.out_norm.weight.grad, 1e-5
    )


@pytest.mark.parametrize("lengths", [(6, 6), (2, 10)])
@on_ranks(cp=2)
def test_lengths_that_zigzag_cannot_cut_are_refused(lengths):
    layer = build(make_config(context_parallel_size=2))
    with pytest.raises(ValueError, match="multiple of 4"):
        layer(torch.randn(6, 1, 24), None, packed_seq_params=thd(lengths))


@on_ranks(cp=2)
def test_a_whole_buffer_zigzag_can_be_declared():
    one = build(groups=alone())
    layer = build(make_config(context_parallel_size=2), cp_layout="zigzag_buffer")
    layer.load_state_dict(one.state_dict())
    x = torch.randn(12, 1, 24)
    packed = thd((3, 9))
    rank = parallel_state.get_context_parallel_rank()
    held = local_indices((3, 9), 2, rank, SequenceLayout.ZIGZAG_BUFFER)
    expected, _ = one(x, None, packed_seq_params=packed)
    actual, _ = layer(x[held], None, packed_seq_params=packed)
    assert_close("output", actual, expected[held], 1e-5)


@on_ranks(cp=2)
def test_the_group_of_the_micro_batch_is_used():
    """A layer built for two ranks runs this micro-batch on one."""
    layer = build(make_config(context_parallel_size=2))
    one = build(groups=alone())
    one.load_state_dict(layer.state_dict())
    packed = thd((8, 4))
    packed.cp_group = group_of_one()
    packed.local_cp_size = 1
    x = torch.randn(12, 1, 24)
    actual, _ = layer(x, None, packed_seq_params=packed)
    expected, _ = one(x, None, packed_seq_params=thd((8, 4)))
    assert_close("output", actual, expected, 1e-5)


@on_ranks(2)
def test_the_bias_of_the_projection_reshards(tmp_path):
    with parallel(tp=2):
        layer = build(make_config(tensor_model_parallel_size=2), bias=True)
        dims = GDNDims.from_config(layer.config)
        whole = torch.arange(float(dims.layout.width))
        rank = parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            layer.in_proj.bias.copy_(take_share(whole, 0, dims.layout.widths, rank, 2))
        dist_checkpointing.save(layer.sharded_state_dict("layer."), str(tmp_path))
    with parallel(tp=1):
        layer = build(make_config(), bias=True)
        state = dist_checkpointing.load(
            layer.sharded_state_dict("layer."), str(tmp_path)
        )
        assert torch.equal(state["layer.in_proj.bias"], whole)


@on_ranks(2)
def test_initial_weights_do_not_depend_on_the_tensor_parallel_size():
    layers = {}
    for tp in (1, 2):
        with parallel(tp=tp):
            layers[tp] = build(
                make_config(tensor_model_parallel_size=tp), conv_bias=True
            )
    for name, whole in layers[1].named_parameters():
        expected = expected_share(name, whole, dist.get_rank(), 2)
        assert torch.equal(layers[2].get_parameter(name), expected), name


def test_decay_parameters_are_fp32_in_a_bf16_model(one_rank):
    config = make_config(bf16=True, params_dtype=torch.bfloat16)
    layer = build(config)
    before = layer.A_log.detach().clone()
    Float16Module(config, layer)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert torch.equal(layer.A_log, before)


def test_the_gate_is_exact_to_fp32_in_a_bf16_model(one_rank):
    layer = build(make_config(bf16=True, params_dtype=torch.bfloat16))
    alpha = torch.randn(1, 5, 8, dtype=torch.bfloat16)
    g, _ = layer._compute_g_and_beta(layer.A_log, layer.dt_bias, alpha, alpha)
    exact = -layer.A_log.double().exp() * F.softplus(
        alpha.double() + layer.dt_bias.double()
    )
    torch.testing.assert_close(g.double(), exact, rtol=1e-6, atol=0)


def test_own_parameters_are_initialised_even_without_initialisation(
    one_rank, monkeypatch
):
    empty = torch.empty
    poison = lambda *a, **k: empty(*a, **k).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", poison)
    layer = build(make_config(perform_initialization=False))
    for name in ("A_log", "dt_bias", "conv1d.weight"):
        assert torch.isfinite(layer.get_parameter(name)).all(), name


def test_l2norm_inside_the_chunk_rule_works(one_rank):
    q = torch.randn(1, 9, 2, 8)
    g = -torch.rand(1, 9, 2)
    beta = torch.rand(1, 9, 2)
    rule = gdn_module().torch_chunk_gated_delta_rule
    inside, _ = rule(q, q, q, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    unit = F.normalize(q, dim=-1)
    outside, _ = rule(unit, unit, q, g=g, beta=beta)
    torch.testing.assert_close(inside, outside, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_slicing_a_parameter_for_context_parallelism_is_not_deprecated():
    module = gdn_module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.get_parameter_local_cp(torch.zeros(4, 3), 0, dist.group.WORLD)


def test_the_mlps_activation_does_not_reach_the_layer(one_rank):
    gelu = build(make_config(activation_func=F.gelu))
    silu = build(make_config(activation_func=F.silu))
    silu.load_state_dict(gelu.state_dict())
    x = torch.randn(6, 1, 24)
    assert torch.equal(gelu(x, None)[0], silu(x, None)[0])


def test_head_counts_are_checked_without_any_config_flag(one_rank):
    with pytest.raises(ValueError, match="multiple"):
        build(make_config(linear_num_value_heads=6))


def test_a_rate_of_zero_is_refused(one_rank):
    with pytest.raises(ValueError, match="A_init_range.*0 < low <= high"):
        build(A_init_range=(0, 0))


def test_packed_documents_run_in_deterministic_mode(one_rank):
    layer = build(make_config(deterministic_mode=True))
    out, _ = layer(torch.randn(8, 1, 24), None, packed_seq_params=thd((3, 5)))
    assert torch.isfinite(out).all()


@with_gdn_norm_out
def test_the_norm_is_not_recomputed_in_evaluation(one_rank):
    config = make_config(
        recompute_granularity="selective",
        recompute_modules=["gdn_norm_out"],
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
    )
    layer = build(config).eval()
    with torch.no_grad(), warnings.catch_warnings():
        out, _ = layer(torch.randn(6, 1, 24), None)
    assert layer.norm_out_checkpoint is None and torch.isfinite(out).all()


def test_an_attention_mask_that_is_not_causal_is_refused(one_rank):
    layer = build()
    with pytest.raises(NotImplementedError):
        layer(torch.randn(4, 1, 24), torch.zeros(1, 1, 4, 4, dtype=torch.bool))
