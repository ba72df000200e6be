"""Our Mamba2 mixer and the adapter beside Megatron's MambaMixer and transformers'
mixers."""

from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing

from megatron_gdn import Documents, Mamba2MixerSubmodules
from megatron_gdn.context_parallel import MambaContextParallel, local_indices
from megatron_gdn.hf import layer_from_hf, layer_to_hf
from tests.distributed.mixers import (
    HIDDEN,
    LINEARS,
    MAMBA_SIZES,
    build_mamba2,
    config_of,
    draw_,
)
from tests.distributed.model_laws import leaves
from tests.host_reads import no_host_reads
from tests.mamba2.oracle import SSDInputs, token_by_token
from tests.parallel import alone, assert_close, groups_of_megatron, parallel
from tests.ranks import on_ranks
from tests.upstream_mamba import megatron_mixer, without_mamba_ssm

# Both sides compute in fp32, in another order: some hundred additions of 6e-8 each.
TOLERANCE = 2e-5


def _theirs(config, groups):
    config.use_mamba_mem_eff_path = False
    theirs = megatron_mixer(config, Mamba2MixerSubmodules(**LINEARS), groups)
    draw_(theirs)
    return theirs


def hf_mixer(kind: str, groups: int = 2) -> torch.nn.Module:
    """transformers' mixer of the tests' sizes, every parameter away from its initial
    value."""
    torch.manual_seed(11)
    if kind == "mamba2":
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

        config = Mamba2Config(
            num_heads=8,
            head_dim=5,
            hidden_size=HIDDEN,
            expand=2,
            n_groups=groups,
            state_size=6,
            num_hidden_layers=1,
            chunk_size=16,
            layer_norm_epsilon=1e-5,
        )
        mixer = Mamba2Mixer(config, 0)
    else:
        from transformers.models.nemotron_h.modeling_nemotron_h import (
            NemotronHConfig,
            NemotronHMamba2Mixer,
        )

        config = NemotronHConfig(
            mamba_num_heads=8,
            mamba_head_dim=5,
            hidden_size=HIDDEN,
            n_groups=groups,
            ssm_state_size=6,
            chunk_size=16,
            layer_norm_epsilon=1e-5,
            layers_block_type=["mamba"],
        )
        mixer = NemotronHMamba2Mixer(config, 0)
    draw_(mixer)
    if kind == "nemotron_h":
        with torch.no_grad():  # time steps near 0.1: where nothing is forgotten at once
            mixer.dt_bias.sub_(3)
    return mixer.eval()


needs_transformers = pytest.mark.skipif(
    not find_spec("transformers"), reason="needs transformers"
)
HF_SIZES = {"mamba_head_dim": 5, "mamba_state_dim": 6}


def run_with(cp: MambaContextParallel, mixer, x, cu_seqlens=None):
    """A Mamba2 mixer around the adapter: what whoever owns such a mixer writes.
    ``[B, s, D]``."""
    proj = cp.pre_conv_ssm(_linear(mixer.in_proj, x), cu_seqlens)
    packed = proj.dim() == 2
    heads = cp.num_heads_local
    groups = cp.n_groups_local
    inner = cp.d_inner_local
    of_groups = groups * cp.d_state
    outputs = []
    rows = proj[None] if packed else proj
    lengths = [rows.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    for piece in rows.split([n for n in lengths if n], dim=1):
        z, xBC, dt = piece.split([inner, inner + 2 * of_groups, heads], dim=-1)
        weight = cp.get_conv1d_weight()
        bias = cp.get_conv1d_bias()
        xBC = F.pad(xBC.mT, (weight.shape[1] - 1, 0))
        xBC = F.silu(F.conv1d(xBC, weight[:, None], bias, groups=len(weight))).mT
        x_, B, C = xBC.split([inner, of_groups, of_groups], dim=-1)
        B, C = (t.unflatten(-1, (groups, -1)) for t in (B, C))
        dt = F.softplus(dt + cp.get_dt_bias())
        skip = cp.get_D()[:, None].expand(*dt.shape, 1)
        g = -cp.get_A_log().exp() * dt
        inputs = SSDInputs(x_.unflatten(-1, (heads, -1)), B, C, dt, g, skip)
        y, _ = token_by_token(inputs, (piece.shape[1],) * piece.shape[0])
        outputs.append(y.to(x.dtype).flatten(2) * F.silu(z))
    y = torch.cat(outputs, dim=1)
    y = cp.post_conv_ssm(y[0] if packed else y, cu_seqlens)
    eps = getattr(mixer.norm, "variance_epsilon", None) or mixer.norm.eps
    y = y.unflatten(-1, (cp.n_groups, -1))
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(
        -2
    ) * mixer.norm.weight
    return _linear(mixer.out_proj, y)


def _linear(module, x):
    return F.linear(x, module.weight)


@on_ranks(2)
def test_the_mixer_equals_megatrons_with_the_same_weights():
    """Output and every gradient, with the same weights under the same names."""
    with parallel(), without_mamba_ssm():
        torch.manual_seed(5)
        theirs = _theirs(config_of(MAMBA_SIZES), groups_of_megatron())
        ours = build_mamba2(config_of(MAMBA_SIZES), alone())
        assert not any(ours.load_state_dict(theirs.state_dict()))
        x, weight = torch.randn(2, 70, 2, HIDDEN)
        found = []
        for mixer in (theirs, ours):
            leaf = x.clone().requires_grad_()
            y, bias = mixer(leaf)
            assert bias is None
            (y * weight).sum().backward()
            grads = {name: p.grad for name, p in mixer.named_parameters()}
            found.append({"output": y.detach(), "input": leaf.grad, **grads})
        assert found[0].keys() == found[1].keys()
        for name, expected in found[0].items():
            assert expected.abs().max() > 0, name
            assert_close(name, found[1][name], expected, TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(tp="tp")
def test_checkpoints_of_megatrons_mixer_load_and_save_under_its_keys(tp, tmp_path):
    config = config_of(MAMBA_SIZES, tensor_model_parallel_size=tp)
    groups = groups_of_megatron()

    def described(mixer):
        state = mixer.sharded_state_dict("mixer.")
        found = [leaf for leaf in leaves(state) if hasattr(leaf, "dtype")]
        return {
            leaf.key: (leaf.global_shape, leaf.dtype, leaf.global_offset)
            for leaf in found
        }

    def through_a_file(one, other) -> None:
        folder = tmp_path / str(one is theirs)
        folder.mkdir(exist_ok=True)
        dist_checkpointing.save(one.sharded_state_dict("mixer."), str(folder))
        loaded = dist_checkpointing.load(
            other.sharded_state_dict("mixer."), str(folder)
        )
        other.load_state_dict({k.removeprefix("mixer."): v for k, v in loaded.items()})
        for name, parameter in theirs.named_parameters():
            assert torch.equal(parameter, other.get_parameter(name)), name

    with without_mamba_ssm():
        torch.manual_seed(5 + groups.tp.rank())
        theirs = _theirs(config, groups)
        ours = build_mamba2(config, groups)
        assert described(ours) == described(theirs)
        shapes = ours.mamba_state_shapes_per_request()
        assert shapes == theirs.mamba_state_shapes_per_request(), (
            "Megatron allocates by them"
        )
        through_a_file(theirs, ours)
        through_a_file(ours, _theirs(config, groups))


@needs_transformers
@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
@on_ranks(2, cp=1)
def test_weights_of_transformers_give_its_outputs_and_come_back_bit_for_bit(kind):
    """Their weights in our mixer: the same output and gradients; and back, bit for
    bit."""
    theirs = hf_mixer(kind)
    limit = tuple(theirs.time_step_limit)
    ours = build_mamba2(config_of(MAMBA_SIZES, **HF_SIZES), alone(), dt_limit=limit)
    state = theirs.state_dict()
    for tp in (1, 2):
        ranks = layer_from_hf(state, ours.global_dims, tp)
        back = layer_to_hf(ranks, ours.global_dims)
        assert back.keys() == state.keys()
        assert all(torch.equal(back[key], tensor) for key, tensor in state.items())
    ours.load_state_dict(layer_from_hf(state, ours.global_dims)[0])
    x, weight = torch.randn(2, 40, 2, HIDDEN)
    one, other = (x.clone().requires_grad_() for _ in range(2))
    expected = theirs(one.transpose(0, 1)).transpose(0, 1)
    y, _ = ours(other)
    for out in (expected, y):
        (out * weight).sum().backward()
    assert_close("output", y, expected, TOLERANCE)
    assert_close("input", other.grad, one.grad, TOLERANCE)
    names = {"conv1d.weight": "conv1d_weight", "conv1d.bias": "conv1d_bias"}
    for name, parameter in theirs.named_parameters():
        got = ours.get_parameter(names.get(name, name)).grad
        assert_close(name, got, parameter.grad, TOLERANCE)


@needs_transformers
@pytest.mark.parametrize("cp_size", [2, 4])
@on_ranks(cp="cp_size")
def test_the_exchange_refuses_what_it_would_cut_wrong(cp_size):
    """On every rank alike."""
    cp = MambaContextParallel(groups_of_megatron().cp, 8, 5, 2, 6, hf_mixer("mamba2"))
    width = 112
    refused = partial(pytest.raises, ValueError)
    odd = torch.tensor([0, 3 * cp_size, 4 * cp_size])
    short = torch.randn(4, width)
    two = torch.randn(2, 4, width)
    with refused(match=f"not a multiple of {2 * cp_size}"):
        cp.pre_conv_ssm(short, odd)
    with refused(match=f"not a multiple of {2 * cp_size}"):
        cp.pre_conv_ssm(torch.randn(1, 3, width))
    with refused(match="does not match the"):
        cp.pre_conv_ssm(short, odd[:-1])
    with refused(match="got 2 batch rows"):
        cp.pre_conv_ssm(two, odd)
    with refused(match=rf"\[B, tokens, {width}\]"):
        cp.pre_conv_ssm(two[..., 1:])
    with refused(match=rf"\[B, tokens, {width}\]"):
        cp.pre_conv_ssm(two[None])
    with refused(match=rf"{40 // cp_size}\]"):
        cp.post_conv_ssm(two)


@needs_transformers
@pytest.mark.parametrize("groups", [1, 2])
@on_ranks(cp=2)
def test_all_sections_travel_in_one_message_each_way(groups):
    """And with the tables made the host reads no tensor."""
    sent = []
    exchange = torch.distributed.all_to_all_single

    def counted(*args, **kwargs):
        sent.append(1)
        return exchange(*args, **kwargs)

    with patch.object(torch.distributed, "all_to_all_single", counted):
        mixer = hf_mixer("mamba2", groups)
        group = groups_of_megatron().cp
        cp = MambaContextParallel(group, 8, 5, groups, 6, mixer)
        lengths = (4, 0, 12)
        packed = Documents.from_cu_seqlens(list(accumulate(lengths, initial=0)), 16)
        for documents, batch in ((None, (2, 8)), (packed, (8,))):
            rows = torch.randn(*batch, 88 + 12 * groups, requires_grad=True)
            # makes the tables, from lengths on the host
            cp.pre_conv_ssm(rows, documents)
            sent.clear()
            with no_host_reads():
                opened = cp.pre_conv_ssm(rows, documents)
                closed = cp.post_conv_ssm(opened[..., :20].contiguous(), documents)
            assert sent == [1, 1]
            closed.sum().backward()
            assert sent == [1] * 4
            sent.clear()


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "cp_size", "groups", "lengths"),
    [
        ("mamba2", 2, 2, None),
        ("mamba2", 2, 1, (8, 0, 20, 4)),
        ("megatron", 2, 2, (8, 0, 20, 4)),
        ("mamba2", 4, 2, (8, 0, 24, 16)),
        pytest.param("megatron", 4, 4, None, marks=pytest.mark.slow),
    ],
)
@on_ranks(cp="cp_size")
def test_the_adapter_around_anothers_mixer_equals_its_own_forward(
    kind, cp_size, groups, lengths
):
    """The adapter around another's mixer, its own forward on one rank being what is
    expected."""
    with without_mamba_ssm():
        if kind == "megatron":
            torch.manual_seed(11)
            config = config_of(MAMBA_SIZES, mamba_num_groups=groups, **HF_SIZES)
            mixer = _theirs(config, alone())
        else:
            mixer = hf_mixer(kind, groups)
        group = groups_of_megatron().cp
        cp = MambaContextParallel(group, 8, 5, groups, 6, mixer)
        tokens, batch = (32, 2) if lengths is None else (sum(lengths), 1)
        x, weight = torch.randn(2, batch, tokens, HIDDEN)
        whole = x.clone().requires_grad_()

        def alone_forward(u):
            if kind == "megatron":
                return mixer(u.transpose(0, 1))[0].transpose(0, 1)
            return mixer(u)

        expected = torch.cat(
            [
                alone_forward(u)
                for u in whole.split(
                    [tokens] if lengths is None else [n for n in lengths if n], dim=1
                )
            ],
            dim=1,
        )
        (expected * weight).sum().backward()
        wanted = {name: p.grad.clone() for name, p in mixer.named_parameters()}
        mixer.zero_grad()

        mine = local_indices(lengths or (tokens,), cp_size, group.rank())
        leaf = x[:, mine].requires_grad_()
        cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
        y = run_with(cp, mixer, leaf if lengths is None else leaf[0], cu_seqlens)
        (y * (weight[:, mine] if lengths is None else weight[0, mine])).sum().backward()
        assert_close("output", y.reshape(leaf.shape), expected[:, mine], TOLERANCE)
        assert_close("input", leaf.grad, whole.grad[:, mine], TOLERANCE)
        for name, parameter in mixer.named_parameters():
            total = parameter.grad.clone()
            torch.distributed.all_reduce(total, group=group)
            assert_close(name, total, wanted[name], TOLERANCE)
