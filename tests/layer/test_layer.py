"""Gated DeltaNet on one rank: its surface, and what it refuses."""

import weakref
from functools import partial

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils.checkpoint import checkpoint

from megatron_gdn import (
    causal_conv1d,
    gated_delta_rule,
    torch_chunk_gated_delta_rule,
    tree_packed_seq_params,
)
from megatron_gdn.mixers import packing
from tests.distributed.layer_laws import (
    build,
    build_layer,
    forward_backward,
    randomise_,
    require_same_bits,
    thd,
    transformer_layer,
)
from tests.distributed.mixers import whole
from tests.parallel import (
    assert_close,
    group_of_one,
    groups_of_megatron,
    make_config,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def test_the_gates_activation_is_the_option_or_else_a_newer_configs_field():
    config = make_config()
    config.gdn_output_gate_activation = "sigmoid"
    assert build(config).output_gate_activation == "sigmoid"
    assert build(config, output_gate_activation="silu").output_gate_activation == "silu"


def test_the_option_or_else_the_configs_field_allows_write_strengths_up_to_2():
    """The field has the name that OLMo Hybrid's config gives it; Megatron's has
    none."""
    config = make_config()
    assert not build(config).allow_neg_eigval
    config.linear_allow_neg_eigval = True
    assert build(config).allow_neg_eigval
    assert not build(config, allow_neg_eigval=False).allow_neg_eigval


@pytest.mark.parametrize(
    "options", [{}, {"allow_neg_eigval": True}, {"use_qk_l2norm": False}], ids=str
)
def test_the_steps_under_upstreams_names_add_up_to_the_forward(options):
    layer = build(**options)
    randomise_(layer)
    x = torch.randn(65, 2, 24)
    proj = layer.in_proj(x)[0].transpose(0, 1)
    qkv, z, b, a = proj.split((160, 96, 8, 8), dim=-1)
    qkv, _ = causal_conv1d(qkv, layer.conv1d.weight.squeeze(1))
    # Megatron 0.19 and 0.18 call it by other names.
    steps = layer._prepare_input_for_gated_delta_rule(qkv, z, 2, 65, b, a)
    q, k, v, z, b, a = layer._prepare_qkv_for_gated_delta_rule(qkv, z, b, a, 2, 65)
    for one, other in zip(steps, (q, k, v, z, b, a), strict=True):
        assert torch.equal(one.view_as(other), other) and one.is_contiguous()
    g, beta = layer._compute_g_and_beta(layer.A_log, layer.dt_bias, a, b)
    o, _ = layer.gated_delta_rule(q, k, v, g=g, beta=beta)
    mixed = layer._apply_gated_norm(o, z).flatten(2).transpose(0, 1)
    assert_close("output", layer(x, None)[0], layer.out_proj(mixed)[0], 1e-5)


@pytest.mark.parametrize("backend", ["reference", "recurrent"])
def test_the_rule_under_upstreams_name_is_that_of_the_layers_backend(
    backend, monkeypatch
):
    """Chunks and single tokens round otherwise."""
    layer = build()
    monkeypatch.setattr(type(layer), "backend", backend)
    q, k, v = torch.randn(3, 1, 130, 2, 8)
    g, beta = -torch.rand(1, 130, 2), torch.rand(1, 130, 2)
    options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
    o = layer.gated_delta_rule(q, k, v, **options)[0]
    backends = {
        name: gated_delta_rule(q, k, v, backend=name, **options)[0]
        for name in ("reference", "recurrent")
    }
    same = [name for name, other in backends.items() if torch.equal(o, other)]
    assert same == [backend]


def test_what_the_backward_read_is_freed_though_the_loss_is_kept():
    layer = build(recompute="light")
    rows = []
    layer.in_proj.register_forward_hook(
        lambda module, args, out: rows.append(weakref.ref(out[0]))
    )
    out, _ = layer(torch.randn(9, 1, 24), None)
    loss = out.square().sum()
    loss.backward()
    assert rows[0]() is None and loss.isfinite() and out.isfinite().all()


@pytest.mark.parametrize("fused", [True, False], ids=["fused norm", "norm as a module"])
def test_the_norm_is_not_recomputed_where_a_checkpoint_keeps_what_is_saved(fused, log):
    layer = build(recompute="light")
    if not fused:
        layer.out_norm.register_forward_hook(lambda *_: None)
    x = torch.randn(9, 2, 24)
    again = partial(checkpoint, layer, use_reentrant=False)
    plain = forward_backward(layer, x)
    assert "recompute" not in log.text
    require_same_bits(forward_backward(layer, x, run=again), plain)
    (said,) = [message for message in log.messages if "recompute" in message]
    assert "saved-tensor hooks" in said


def test_hooks_that_wait_for_parameters_run_for_modules_that_are_never_called():
    layer = build()
    seen = []
    for name in ("conv1d", "out_norm"):
        hook = lambda module, *_, name=name: seen.append(name)  # noqa: E731
        layer.get_submodule(name).register_forward_pre_hook(hook)
        taking_keywords = lambda module, args, kwargs, name=name: seen.append(name)  # noqa: E731
        layer.get_submodule(name).register_forward_pre_hook(
            taking_keywords, with_kwargs=True
        )
    layer(torch.randn(4, 1, 24), None)
    assert seen == ["conv1d", "conv1d", "out_norm", "out_norm"]


def test_names_that_other_tools_look_up():
    layer = build()
    names = "dt_bias A_log in_proj.weight conv1d.weight out_norm.weight out_proj.weight"
    assert [name for name, _ in layer.named_parameters()] == names.split()
    sizes = {
        "qk_dim": 32,
        "v_dim": 96,
        "in_proj_dim": 272,
        "conv_dim": 160,
        "tp_size": 1,
        "cp_size": 1,
        "sp_size": 1,
        "num_key_heads": 4,
        "num_value_heads": 8,
        "key_head_dim": 8,
        "value_head_dim": 12,
        "conv_kernel_dim": 4,
        "hidden_size": 24,
        "layer_number": 1,
        "num_v_heads_local_tp": 8,
        "qk_dim_local_tp": 32,
        "v_dim_local_tp": 96,
    }
    assert {name: getattr(layer, name) for name in sizes} == sizes
    assert layer.gated_delta_rule is torch_chunk_gated_delta_rule
    methods = """reset_parameters sharded_state_dict backward_dw _backward_in_proj
        _backward_out_proj _apply_gated_norm _compute_g_and_beta _prepare_qkv_for_gated_delta_rule
        _prepare_input_for_gated_delta_rule set_for_recompute_input_layernorm"""
    for method in methods.split():
        assert callable(getattr(layer, method))


def test_it_builds_inside_a_transformer_layer_as_megatron_passes_its_arguments():
    layer = transformer_layer(make_config(cp_comm_type="p2p"), name="decoder.layers.0")
    out, _ = layer(torch.randn(8, 2, 24), None, rotary_pos_emb=torch.zeros(8, 1, 1, 4))
    assert out.shape == (8, 2, 24)


def test_it_takes_every_keyword_that_newer_megatron_passes_and_no_other():
    layer = build(pp_layer_offset=3, is_mtp_layer=True, cp_comm_type=["a2a"], name="x")
    assert layer.in_proj is not None
    with pytest.raises(TypeError, match="backnd"):
        build(backnd="reference")
    with pytest.raises(TypeError, match="surprise.*ignores only"):
        layer(torch.randn(4, 1, 24), None, surprise=1)


def test_groups_default_to_megatrons_global_ones():
    assert (
        build().tp_group
        is build_layer(make_config(), groups_of_megatron(), {}).tp_group
    )


def test_the_chosen_backend_is_logged_once_with_its_reason(log):
    build()
    build()
    (line,) = [message for message in log.messages if "backend" in message]
    assert "backend 'reference' (not flash_qla: flash_qla runs on a GPU" in line


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gdn", "GatedDeltaNet: delta rule"),
        ("gdn2", "GatedDeltaNet2: GDN-2"),
        ("gdp", "GatedDeltaProduct: delta rule"),
        ("kda", "KimiDeltaAttention: KDA"),
        ("mamba2", "Mamba2Mixer: SSD"),
    ],
)
def test_the_log_names_the_mixer_and_its_recurrence(kind, said, log):
    whole(kind)
    assert f"{said} backend 'reference'" in log.text


def test_the_packed_metadata_is_read_once_for_all_layers(monkeypatch):
    layers = [build(), build()]
    params = thd((3, 5))
    x = torch.randn(8, 1, 24)
    layers[0](x, None, packed_seq_params=params)

    def read_again(*args):
        raise AssertionError("a second layer read cu_seqlens")

    monkeypatch.setattr(packing, "_read_documents", read_again)
    layers[1](x, None, packed_seq_params=params)


def forward(*shape, mask=None, config=None, **given):
    return lambda: build(config)(torch.randn(*shape, 24), mask, **given)


TREE = tree_packed_seq_params([3, 2], [-1, 0], device="cpu")
ALIGNED = make_config(batch_invariant_mode=True)
PADDED = torch.tensor([[1, 1, 1, 0], [1, 1, 2, 2]])
SIZED = PackedSeqParams(local_cp_size=2)


def sized_beside_a_group():
    packed = PackedSeqParams(local_cp_size=2, cp_group=group_of_one())
    build()(torch.randn(4, 1, 24), None, packed_seq_params=packed)


CONTEXTS = {
    name: StaticInferenceContext(1, 4)
    for name in ("inference_context", "inference_params")
}
REFUSED = [
    (
        lambda: build(output_gate_activation="tanh"),
        ValueError,
        "use one of 'silu', 'sigmoid'",
    ),
    (lambda: build(backend="cuda"), ValueError, "unknown backend 'cuda'.*'reference'"),
    (lambda: build(backend="fla"), ValueError, "fla runs on a GPU, not on cpu"),
    (lambda: build(rule_operands="tf32"), ValueError, "'tf32'.*'fp16' or 'bf16'"),
    (forward(8, 2, packed_seq_params=thd((8,))), ValueError, "batch of 1"),
    (
        forward(5, 2, packed_seq_params=TREE),
        ValueError,
        "packed documents need a batch of 1",
    ),
    (
        forward(5, 1, config=ALIGNED, packed_seq_params=TREE),
        NotImplementedError,
        "begin anew in every document",
    ),
    (
        forward(8, 1, packed_seq_params=thd((4, 3))),
        ValueError,
        "ends at 7, which does not match the 8",
    ),
    (
        forward(4, 2, mask=PADDED),
        NotImplementedError,
        r"megatron_gdn\.pack_rows.*unpack_rows",
    ),
    (
        forward(4, 1, inference_context=object()),
        NotImplementedError,
        "generates with Megatron's StaticInferenceContext",
    ),
    (
        forward(4, 1, inference_params=object()),
        NotImplementedError,
        "not with a object",
    ),
    (forward(4, 1, sequence_len_offset=0), NotImplementedError, "sequence_len_offset"),
    (
        forward(4, 1, attention_bias=torch.zeros(1)),
        NotImplementedError,
        "attention_bias",
    ),
    (
        forward(4, 1, packed_seq_params=SIZED),
        ValueError,
        "local_cp_size=2 and no cp_group",
    ),
    (sized_beside_a_group, ValueError, "local_cp_size=2 and a cp_group of 1 ranks"),
    (forward(4, 1, **CONTEXTS), ValueError, "two different objects; give one"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), REFUSED, ids=[r[2] for r in REFUSED]
)
def test_bad_input_is_refused_in_words(call, error, message):
    with pytest.raises(error, match=message):
        call()
