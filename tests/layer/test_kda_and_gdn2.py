"""Kimi Delta Attention and Gated DeltaNet-2 on one rank: options, first values, what is
refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_gdn.compat.torch_linear import DuplicatedLinear
from megatron_gdn.gdn2.rule import FlaGDN2, PlainGDN2, _repeat_key_heads, choose_gdn2
from megatron_gdn.kda.layer import KimiDeltaAttention, _has_whole_weight
from megatron_gdn.kda.sizes import KDADims
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.state_maps.state_map import StateShape
from megatron_gdn.specs import kimi_delta_attention_spec
from tests.distributed.layer_laws import thd
from tests.distributed.mixers import GDN2_FP32, KDA_FP32, whole
from tests.fp8_twin import Fp8NormedColumn
from tests.gdn2.oracle import random_inputs
from tests.parallel import alone

pytestmark = pytest.mark.usefixtures("one_rank")

DETERMINISTIC = {"deterministic_mode": True}


@pytest.mark.parametrize(
    ("kind", "options", "changes", "said"),
    [
        ("kda", {"gate_lower_bound": 5.0}, {}, "gate_lower_bound=5.0 must be below 0"),
        ("kda", {"A_init_range": (0, 1)}, {}, "0 < low <= high"),
        (
            "kda",
            {"forget_rank": -1},
            {},
            "forget_rank=-1 is not a size; it must be an integer",
        ),
        (
            "kda",
            {"backend": "flash_qla"},
            {},
            "unknown backend 'flash_qla' of Kimi Delta Attent",
        ),
        (
            "gdn2",
            {"backend": "flash_qla"},
            {},
            "unknown backend 'flash_qla' of Gated DeltaNet-2",
        ),
        *(
            (kind, {"backend": "fla"}, changes, "fla runs on a GPU")
            for kind in ("kda", "gdn2")
            for changes in ({}, DETERMINISTIC)
        ),
        *(
            (
                kind,
                {},
                {"linear_num_key_heads": 3},
                "is not a multiple of num_key_heads=3",
            )
            for kind in ("kda", "gdn2")
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(kind, options, changes, said):
    with pytest.raises(ValueError, match=said):
        whole(kind, changes, **options)


def test_ranks_come_from_the_config_unless_they_are_given():
    """Newer Megatrons have fields of these names."""
    fields = {"kda_f_lora_rank": 6, "kda_gate_lora_rank": None}
    config = SimpleNamespace(**vars(KDA_FP32.config()) | fields)
    dims = KDADims.of(config)
    assert (dims.forget_rank, dims.output_rank) == (6, 0)
    dims = KDADims.of(config, forget_rank=0, output_rank=10)
    assert (dims.forget_rank, dims.output_rank) == (0, 10)


def test_narrow_halves_are_whole_on_every_rank():
    dims = whole("kda", forget_rank=6, output_rank=0).global_dims.shard(2)
    assert dims.forget_rank == 6
    assert dims.in_proj_layout.widths == (5, 5, 12)
    full = whole("kda", forget_rank=0, output_rank=0).global_dims.shard(2)
    assert full.in_proj_layout.names == ("query", "key", "value", "g", "gate")
    assert full.in_proj_layout.widths == (5, 5, 12, 10, 12)


# As Megatron's config is after --tensor-parallel-num-weight-shards 2.
GTP = {"tensor_parallel_num_weight_shards": 2, "gtp_weight_remat_size": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp4": "e2m1"}, "the gates of KimiDeltaAttention"),
        (
            {"linear_allow_neg_eigval": True},
            "allow_neg_eigval to the GatedDeltaNet layers alone",
        ),
        (
            GTP,
            "--tensor-parallel-num-weight-shards 2 .*sections of in_proj of KimiDelta",
        ),
    ],
)
def test_settings_that_other_layers_take_are_refused(changes, said):
    config = KDA_FP32.config()
    vars(config).update(changes)
    with pytest.raises(NotImplementedError, match=said):
        KDA_FP32.whole(config)


def test_what_it_does_not_read_is_named(log):
    config = KDA_FP32.config()
    vars(config).update(linear_something_new=3)
    KDA_FP32.whole(config)
    assert "KimiDeltaAttention: config.linear_something_new=3 has no effect" in log.text


def test_first_values_of_gdn2_are_those_of_megatrons_layer():
    config = GDN2_FP32.config(bf16=True, params_dtype=torch.bfloat16)
    mixer = GDN2_FP32.build(config, alone())
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    rates = mixer.A_log.exp()
    steps = F.softplus(mixer.dt_bias)
    assert rates.shape == (2,) and rates.min() >= 1 and rates.max() <= 16
    assert (
        steps.shape == (10,) and steps.min() * 1.001 >= 1e-3 and steps.max() <= 0.1001
    )
    assert list(dict(mixer.named_parameters())) == [
        "dt_bias",
        "A_log",
        "in_proj.weight",
        "conv1d.weight",
        "out_norm.weight",
        "out_proj.weight",
    ]


def test_auto_of_gdn2_takes_fla_on_a_gpu_unless_bits_must_repeat(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    given = StateShape(2, 128, 128), torch.device("cuda"), torch.bfloat16
    assert type(choose_gdn2("auto", *given).rule) is FlaGDN2
    assert type(choose_gdn2("auto", *given, Bits.DETERMINISTIC).rule) is PlainGDN2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_layer_gives_its_rule_log_decays_in_fp32(dtype, monkeypatch):
    """cuDNN computes 16-bit ones wrong, and `CudnnKDA` refuses them."""
    seen = []
    begin = PlainRule.begin

    def watch(rule, inputs, documents):
        seen.append(inputs.g.dtype)
        return begin(rule, inputs, documents)

    monkeypatch.setattr(PlainRule, "begin", watch)
    layer = whole("kda", {"params_dtype": dtype})
    layer(torch.randn(5, 1, layer.config.hidden_size, dtype=dtype), None)
    assert seen == [torch.float32]


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_every_value_head_of_gdn2_gets_its_key_heads_tensors(ratio):
    """For fla, whose kernels have as many key heads as value heads."""
    inputs = random_inputs("usual", rows=1, tokens=3, G=2, H=2 * ratio)
    found = _repeat_key_heads(inputs)
    for name in ("q", "k", "g", "b"):
        given = getattr(inputs, name)
        repeated = getattr(found, name)
        assert repeated.shape == (1, 3, 2 * ratio, 5)
        for head in range(2 * ratio):
            assert torch.equal(repeated[:, :, head], given[:, :, head // ratio]), (
                name,
                head,
            )
    assert torch.equal(found.v, inputs.v) and torch.equal(found.w, inputs.w)


def old_state(mixer, state: dict) -> dict:
    """The state dict that version 0.1 wrote for this mixer, on one rank."""
    dims = mixer.dims
    state = dict(state)
    rows = state.pop("in_proj.weight")
    parts = [*rows.split(dims.in_proj_layout.widths)]
    for old, new in (("f", "f"), ("z", "g")):
        if f"{new}_a_proj.weight" in state:
            parts.append(state.pop(f"{new}_a_proj.weight"))
            state[f"{old}_b_weight"] = state.pop(f"{new}_b_proj.weight")
        elif f"{new}_proj.weight" in state:
            parts.append(state.pop(f"{new}_proj.weight"))
    parts.append(state.pop("beta_proj.weight"))
    state["conv1d_weight"] = state.pop("conv1d.weight")
    for name in [name for name in state if name.endswith("_proj._extra_state")]:
        if not name.startswith(("in_proj", "out_proj")):
            del state[name]
    return {**state, "in_proj.weight": torch.cat(parts)}


@pytest.mark.parametrize("output_rank", [0, 3])
@pytest.mark.parametrize("forget_rank", [0, 4])
def test_a_state_dict_of_version_0_1_loads_bit_for_bit(forget_rank, output_rank, log):
    ranks = {"forget_rank": forget_rank, "output_rank": output_rank}
    given = whole("kda", **ranks).state_dict()
    layer = KDA_FP32.build(KDA_FP32.config(), alone(), **ranks)
    assert not any(layer.load_state_dict(old_state(layer, given)))
    assert "were written by megatron_gdn 0.1" in log.text
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, given[name]), name


def test_a_state_dict_of_version_0_1_of_several_ranks_is_refused():
    layer = whole("kda")
    layer.tp_size = 2
    with pytest.raises(ValueError, match="converted on one rank only"):
        layer.load_state_dict(old_state(layer, layer.state_dict()))


@pytest.mark.parametrize(
    ("name", "linear", "said"),
    [
        ("beta_proj", IdentityOp, "has no beta_proj, which this layer needs"),
        ("f_a_proj", ColumnParallelLinear, "f_a_proj .* must have its whole weight"),
        (
            "in_proj",
            Fp8NormedColumn,
            "in_proj of KimiDeltaAttention begins with a norm",
        ),
    ],
)
def test_submodules_that_would_compute_another_layer_are_refused(name, linear, said):
    spec = kimi_delta_attention_spec("local", forget_rank=4)
    setattr(spec.submodules, name, linear)
    with pytest.raises(ValueError, match=said):
        build_module(spec, KDA_FP32.config(), layer_number=1)


def test_the_nearest_class_says_whether_every_rank_has_the_whole_weight():
    """Transformer Engine's column-parallel linears are subclasses of its TELinear."""

    class Whole:
        def __init__(self, size, parallel_mode): ...

    class Column(Whole):
        def __init__(self, size, gather_output): ...

    def passing(base):
        return type("Passing", (base,), {"__init__": lambda self, *args, **more: None})

    for cls, is_whole in ((Whole, True), (Column, False)):
        for linear in (cls, passing(cls), ModuleSpec(passing(cls))):
            assert _has_whole_weight(linear) == is_whole


def test_the_in_proj_that_megatrons_scripts_cut_says_its_width(monkeypatch):
    for cut in (True, False):
        monkeypatch.setattr(KimiDeltaAttention, "scripts_split_in_proj", cut)
        layer = whole("kda")
        width = layer.in_proj.weight.shape[0] if cut else None
        assert getattr(layer, "in_proj_dim", None) == width


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_mode": "column"},
        {"parallel_mode": None},
        {"bias": True, "skip_bias_add": True},
    ],
    ids=str,
)
def test_a_linear_that_every_rank_has_whole_refuses_what_it_cannot_do(changes):
    legal = {
        "config": KDA_FP32.config(),
        "init_method": lambda weight: weight.fill_(1),  # no function of torch.nn.init
        "parallel_mode": "duplicated",
    }
    assert DuplicatedLinear(3, 2, skip_bias_add=True, **legal).bias is None
    linear = DuplicatedLinear(3, 2, bias=True, **legal)
    assert linear.bias.tolist() == [0, 0]
    torch.nn.init.ones_(linear.bias)
    y, bias_to_add = linear(torch.ones(1, 3))
    assert y.tolist() == [[4, 4]] and bias_to_add is None
    with pytest.raises(ValueError, match="parallel_mode='duplicated' and adds its bi"):
        DuplicatedLinear(3, 2, **{**legal, **changes})


def test_fields_of_newer_configs_are_read_and_options_go_before_them():
    config = KDA_FP32.config()
    fields = {"kda_f_lora_rank": 4, "kda_gate_lora_rank": 3, "kda_lower_bound": -5.0}
    vars(config).update(fields, kda_safe_gate=True)
    spec = kimi_delta_attention_spec("local")
    layer = build_module(spec, config, layer_number=1)
    assert (layer.dims.forget_rank, layer.dims.output_rank) == (4, 3)
    assert layer.gate_lower_bound == -5.0
    options = {"forget_rank": 0, "output_rank": 2, "gate_lower_bound": -4.0}
    spec = kimi_delta_attention_spec("local", **options)
    layer = build_module(spec, config, layer_number=1)
    assert (layer.dims.forget_rank, layer.dims.output_rank) == (0, 2)
    assert layer.gate_lower_bound == -4.0
    vars(config).update(kda_lower_bound=None)
    with pytest.raises(ValueError, match="kda_safe_gate=True .* no bound is given"):
        build_module(kimi_delta_attention_spec("local"), config, layer_number=1)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_full_gates_are_read_where_in_proj_wrote_them(packed, monkeypatch):
    """No copy joins beta to them, and not one bit depends on it."""
    layer = whole("kda", DETERMINISTIC, forget_rank=0, output_rank=0)
    layer.train()
    x = torch.randn(24, 1, 20)
    documents = thd((10, 0, 14)) if packed else None
    written = []
    layer.in_proj.register_forward_hook(lambda *call: written.append(call[-1][0]))

    def run() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad(set_to_none=True)
        out, _ = layer(leaf, packed_seq_params=documents)
        out.backward(torch.cos(out.detach()))
        return [out, leaf.grad, *(p.grad for p in layer.parameters())]

    read = []
    mix = type(layer)._mix
    monkeypatch.setattr(
        type(layer), "_mix", lambda self, *a: (read.append(a[0]), mix(self, *a))[1]
    )
    found = run()
    assert read[0] is written[0]
    monkeypatch.setattr(
        type(layer), "project_rows_and_gates", lambda self, x: (self.project(x), None)
    )
    joined = run()
    assert read[1] is not written[1]
    assert all(map(torch.equal, found, joined))
