"""Kimi Delta Attention, one layer on one rank: transformers' modules, its recurrence, its options.

Transformers' modules are the recurrence in fp64 to 1e-4: they subtract running sums of log-decays
in fp32. Ours is the recurrence to 1e-5, some 80 roundings of 1.2e-7 in a row; where short keys make
both worse, to twice the distance of theirs.

Legend: D hidden size, H heads, K key dim, V value dim.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.elementwise import l2norm
from tests.distributed.layer_laws import thd
from tests.distributed.mixer_laws import equals_written_out
from tests.kda.oracle import recurrent_kda
from tests.kda_mixers import kda_config, whole_mixer

pytestmark = pytest.mark.usefixtures("one_rank")
D, H, HEAD = 24, 3, 8
FULL = {"forget_rank": 0, "output_rank": 0}


def written_out(mixer, x, lengths):
    """The whole mixer token by token in fp64, differentiable."""
    p = {name: t.detach().clone().requires_grad_() for name, t in mixer.named_parameters()}
    layout, heads = mixer.dims.in_proj_layout, mixer.dims.num_value_heads
    outputs = []
    for u in x.split([n for n in lengths if n]):
        rows = (u @ p["in_proj.weight"].T).transpose(0, 1)
        of = {name: rows[..., layout.columns(name)] for name in layout.names}
        f = of["f"] if "f" in of else of["f_a"] @ p["f_b_weight"].T
        z = of["z"] if "z" in of else of["z_a"] @ p["z_b_weight"].T
        qkv = torch.cat([of["query"], of["key"], of["value"]], -1)
        qkv = F.pad(qkv.mT, (p["conv1d_weight"].shape[-1] - 1, 0))
        bias = p.get("conv1d_bias")
        qkv = F.silu(F.conv1d(qkv, p["conv1d_weight"], bias, groups=qkv.shape[1])).mT
        q, k, v = qkv.split(mixer.dims.layout.conv_widths, -1)
        q, k = (t.unflatten(-1, (mixer.dims.num_key_heads, -1)) for t in (q, k))
        v = v.unflatten(-1, (heads, -1))
        x, rate = (f + p["dt_bias"]).unflatten(-1, (heads, -1)), p["A_log"].exp()[:, None]
        bound = mixer.gate_lower_bound
        g = -rate * F.softplus(x) if bound is None else bound * (rate * x).sigmoid()
        o, _ = recurrent_kda(RuleInputs(l2norm(q), l2norm(k), v, g, of["beta"].sigmoid()))
        normed = o * (o.square().mean(-1, keepdim=True) + mixer.out_norm.eps).rsqrt()
        y = normed * p["out_norm.weight"] * z.unflatten(-1, (heads, -1)).sigmoid()
        outputs.append((y.flatten(2) @ p["out_proj.weight"].T).transpose(0, 1))
    return torch.cat(outputs), p


@pytest.mark.parametrize("lengths", [None, (70, 0, 1, 66)], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"conv_bias": True, "forget_rank": 4, "output_rank": 0},
        {"gate_lower_bound": -5.0, "output_rank": 3, "forget_rank": 0},
        {**FULL, "recompute": "light"},
        {"recompute": "full"},
    ],
    ids=["low rank", "full output gate", "bounded", "light", "full"],
)
def test_output_and_every_gradient_are_those_of_the_recurrence(options, lengths):
    mixer = whole_mixer(kda_config(params_dtype=torch.float64), **options)
    equals_written_out(mixer, written_out, lengths, tokens=40)


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"gate_lower_bound": 5.0}, {}, "gate_lower_bound=5.0 must be below 0"),
        ({"A_init_range": (0, 1)}, {}, "0 < low <= high"),
        ({"forget_rank": -1}, {}, "forget_rank=-1 is not a size; it must be an integer"),
        ({"backend": "flash_qla"}, {}, "unknown backend 'flash_qla' of Kimi Delta Attention"),
        ({"backend": "fla"}, {}, "fla runs on a GPU"),
        ({"backend": "fla"}, {"deterministic_mode": True}, "in deterministic mode use 'auto'"),
        ({}, {"linear_num_key_heads": 3}, "is not a multiple of num_key_heads=3"),
        ({"recompute": "some"}, {}, "recompute='some' is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(options, changes, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        whole_mixer(kda_config(**changes), **options)


def test_narrow_halves_that_ranks_cannot_share_are_refused():
    dims = whole_mixer(kda_config(), forget_rank=6, output_rank=0).global_dims
    assert dims.shard(2).in_proj_layout.widths == (5, 5, 12, 3, 12, 2)
    with pytest.raises(ValueError, match="use one of 1, 2"):
        dims.shard(4)


# As Megatron's config is after --tensor-parallel-num-weight-shards 2.
GTP = {"tensor_parallel_num_weight_shards": 2, "gtp_weight_remat_size": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp8": "hybrid"}, "KimiDeltaAttention under fp8"),
        ({"fp4": "e2m1"}, "the gates of KimiDeltaAttention"),
        ({"linear_allow_neg_eigval": True}, "allow_neg_eigval to the GatedDeltaNet layers alone"),
        ({"delay_wgrad_compute": True}, "the gradients of its gates' weights at once"),
        (GTP, "--tensor-parallel-num-weight-shards 2 .*sections of in_proj of KimiDelta"),
    ],
)
def test_settings_that_other_layers_take_are_refused(changes, said):
    config = kda_config()
    vars(config).update(changes)
    with pytest.raises(NotImplementedError, match=said):
        whole_mixer(config)


def test_what_it_does_not_read_is_named(log):
    config = kda_config()
    vars(config).update(linear_something_new=3)
    whole_mixer(config)
    assert "KimiDeltaAttention: config.linear_something_new=3 has no effect" in log.text


def test_packed_documents_that_a_graph_of_the_layer_would_replay_are_refused():
    mixer = whole_mixer(kda_config())
    vars(mixer.config).update(cuda_graph_impl="local")
    with pytest.raises(NotImplementedError, match="boundaries of the first micro-batch"):
        mixer(torch.randn(9, 1, 20), packed_seq_params=thd((4, 5)))
