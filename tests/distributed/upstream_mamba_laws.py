"""Run on every rank: our Mamba2 mixer beside Megatron's MambaMixer and transformers' mixers."""

import os
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing

from megatron_gdn import Documents
from megatron_gdn.context_parallel import MambaContextParallel, local_indices
from megatron_gdn.hf import mamba2_layer_from_hf, mamba2_layer_to_hf
from tests.distributed.mixer_laws import groups_of_megatron, in_a_shared_folder
from tests.examples.spec_laws import _leaves
from tests.host_reads import no_host_reads
from tests.mamba2.oracle import SSDInputs, token_by_token
from tests.mamba_mixers import LOCAL, D, alone, build, mamba_config, randomise_
from tests.parallel import assert_close, parallel
from tests.upstream_mamba import megatron_mixer, without_mamba_ssm

# Both sides compute in fp32, in another order: some hundred additions of 6e-8 each.
TOLERANCE = 2e-5


def _theirs(config, groups):
    config.use_mamba_mem_eff_path = False
    theirs = megatron_mixer(config, LOCAL, groups)
    randomise_(theirs)
    return theirs


def equals_megatrons() -> None:
    """Output and every gradient, with the same weights under the same names."""
    with parallel(), without_mamba_ssm():
        torch.manual_seed(5)
        theirs = _theirs(mamba_config(), groups_of_megatron())
        ours = build(mamba_config(), alone())
        assert not any(ours.load_state_dict(theirs.state_dict()))
        x, weight = torch.randn(2, 70, 2, D)
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


def _checkpoints_of_megatrons(folder: str, tp: int) -> None:
    with parallel(tp=tp), without_mamba_ssm():
        config = mamba_config(tensor_model_parallel_size=tp)
        torch.manual_seed(5 + groups_of_megatron().tp.rank())
        theirs, ours = (_theirs(config, groups_of_megatron()), build(config, groups_of_megatron()))

        def described(mixer):
            state = mixer.sharded_state_dict("mixer.")
            leaves = [leaf for leaf in _leaves(state) if hasattr(leaf, "dtype")]
            return {
                leaf.key: (leaf.global_shape, leaf.dtype, leaf.global_offset) for leaf in leaves
            }

        assert described(ours) == described(theirs)
        dist_checkpointing.save(theirs.sharded_state_dict("mixer."), f"{folder}/theirs")
        loaded = dist_checkpointing.load(ours.sharded_state_dict("mixer."), f"{folder}/theirs")
        ours.load_state_dict({k.removeprefix("mixer."): v for k, v in loaded.items()})
        for name, parameter in theirs.named_parameters():
            assert torch.equal(parameter, ours.get_parameter(name)), name
        again = _theirs(config, groups_of_megatron())
        dist_checkpointing.save(ours.sharded_state_dict("mixer."), f"{folder}/ours")
        loaded = dist_checkpointing.load(again.sharded_state_dict("mixer."), f"{folder}/ours")
        again.load_state_dict({k.removeprefix("mixer."): v for k, v in loaded.items()})
        for name, parameter in theirs.named_parameters():
            assert torch.equal(parameter, again.get_parameter(name)), name


def checkpoints_of_megatrons(tp: int) -> None:
    def with_folders(folder: str) -> None:
        for name in ("theirs", "ours"):
            os.makedirs(f"{folder}/{name}", exist_ok=True)
        _checkpoints_of_megatrons(folder, tp)

    in_a_shared_folder(with_folders)


def hf_mixer(kind: str, groups: int = 2) -> torch.nn.Module:
    """transformers' mixer of the tests' sizes, every parameter away from its initial value."""
    torch.manual_seed(11)
    if kind == "mamba2":
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

        config = Mamba2Config(
            num_heads=8, head_dim=5, hidden_size=D, expand=2, n_groups=groups, state_size=6,
            num_hidden_layers=1, chunk_size=16, layer_norm_epsilon=1e-5,
        )  # fmt: skip
        mixer = Mamba2Mixer(config, 0)
    else:
        from transformers.models.nemotron_h.modeling_nemotron_h import (
            NemotronHConfig,
            NemotronHMamba2Mixer,
        )

        config = NemotronHConfig(
            mamba_num_heads=8, mamba_head_dim=5, hidden_size=D, n_groups=groups, ssm_state_size=6,
            chunk_size=16, layer_norm_epsilon=1e-5, layers_block_type=["mamba"],
        )  # fmt: skip
        mixer = NemotronHMamba2Mixer(config, 0)
    randomise_(mixer)
    if kind == "nemotron_h":
        with torch.no_grad():  # time steps near 0.1: where nothing is forgotten at once
            mixer.dt_bias.sub_(3)
    return mixer.eval()


HF_SIZES = {"mamba_head_dim": 5, "mamba_state_dim": 6}


def equals_transformers(kind: str) -> None:
    """Their weights in our mixer: the same output and gradients; and back, bit for bit."""
    with parallel():
        theirs = hf_mixer(kind)
        limit = tuple(theirs.time_step_limit)
        ours = build(mamba_config(**HF_SIZES), alone(), dt_limit=limit)
        state = theirs.state_dict()
        for tp in (1, 2):
            ranks = mamba2_layer_from_hf(state, ours.global_dims, tp)
            back = mamba2_layer_to_hf(ranks, ours.global_dims)
            assert back.keys() == state.keys()
            assert all(torch.equal(back[key], tensor) for key, tensor in state.items())
        ours.load_state_dict(mamba2_layer_from_hf(state, ours.global_dims)[0])
        x, weight = torch.randn(2, 40, 2, D)
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


def exchange_and_refusals(cp_size: int, groups: int) -> None:
    """The exchange against its definition, exactly; and what it refuses, on every rank alike."""
    with parallel(cp=cp_size):
        mixer, group = hf_mixer("mamba2", groups), groups_of_megatron().cp
        cp, rank = (
            MambaContextParallel(group, 8, 5, groups, 6, mixer),
            groups_of_megatron().cp.rank(),
        )
        lengths = (2 * cp_size, 0, 6 * cp_size, 4 * cp_size)
        sections = torch.arange(80 + 12 * groups + 8).split([40, 40, 6 * groups, 6 * groups, 8])
        copies = [max(1, cp_size // groups) if i in (2, 3) else 1 for i in range(5)]
        columns = torch.cat([
            section.chunk(cp_size // n)[rank // n]
            for section, n in zip(sections, copies, strict=True)
        ])  # fmt: skip
        for documents, batch in ((None, 2), (lengths, 1)):
            total = sum(lengths)
            rows = torch.randn(batch, total, 88 + 12 * groups)
            mine = local_indices(documents or (total,), cp_size, rank)
            given, cu = rows[:, mine], None
            if documents is not None:
                given, cu = given[0], torch.tensor([0, *documents]).cumsum(0)
            opened = cp.pre_conv_ssm(given, cu)
            assert torch.equal(opened, rows[..., columns] if cu is None else rows[0][:, columns])
            mixed = rows[..., :40] if cu is None else rows[0, :, :40]
            closed = cp.post_conv_ssm(mixed[..., columns[: 40 // cp_size]].contiguous(), cu)
            assert torch.equal(closed, rows[:, mine, :40] if cu is None else rows[0, mine, :40])
            again = cp.pre_conv_ssm(given, None if documents is None else cu)
            assert torch.equal(again, opened)
        width = 88 + 12 * groups

        def message(function, *given) -> str:
            try:
                function(*given)
            except ValueError as error:
                return str(error)
            return ""

        odd = torch.tensor([0, 2 * cp_size + cp_size, 4 * cp_size])
        short = torch.randn(4, width)
        assert f"not a multiple of {2 * cp_size}" in message(cp.pre_conv_ssm, short, odd)
        odd_rows = torch.randn(1, 3, width)
        assert f"not a multiple of {2 * cp_size}" in message(cp.pre_conv_ssm, odd_rows)
        assert "does not match the" in message(cp.pre_conv_ssm, short, odd[:-1])
        two = torch.randn(2, 4, width)
        assert "got 2 batch rows" in message(cp.pre_conv_ssm, two, odd)
        assert f"[B, tokens, {width}]" in message(cp.pre_conv_ssm, two[..., 1:])
        assert f"{40 // cp_size}]" in message(cp.post_conv_ssm, two)


def one_message_each_way(cp_size: int, groups: int) -> None:
    """All sections travel in one all-to-all per direction, and with
    the tables made the host reads no tensor."""
    sent = []
    exchange = torch.distributed.all_to_all_single

    def counted(*args, **kwargs):
        sent.append(1)
        return exchange(*args, **kwargs)

    with parallel(cp=cp_size), patch.object(torch.distributed, "all_to_all_single", counted):
        mixer, group = hf_mixer("mamba2", groups), groups_of_megatron().cp
        cp = MambaContextParallel(group, 8, 5, groups, 6, mixer)
        lengths = (2 * cp_size, 0, 6 * cp_size)
        packed = Documents.from_cu_seqlens(
            [0, *torch.tensor(lengths).cumsum(0).tolist()], 8 * cp_size
        )
        for documents, batch in ((None, (2, 8)), (packed, (8,))):
            rows = torch.randn(*batch, 88 + 12 * groups, requires_grad=True)
            cp.pre_conv_ssm(rows, documents)  # makes the tables, from lengths on the host
            sent.clear()
            with no_host_reads():
                opened = cp.pre_conv_ssm(rows, documents)
                closed = cp.post_conv_ssm(opened[..., : 40 // cp_size].contiguous(), documents)
            assert sent == [1, 1]
            closed.sum().backward()
            assert sent == [1] * 4
            sent.clear()


def run_with(cp: MambaContextParallel, mixer, x, cu_seqlens=None):
    """A Mamba2 mixer around the adapter: what whoever owns such a mixer writes. ``[B, s, D]``."""
    proj = cp.pre_conv_ssm(_linear(mixer.in_proj, x), cu_seqlens)
    packed = proj.dim() == 2
    heads, groups, inner = cp.num_heads_local, cp.n_groups_local, cp.d_inner_local
    of_groups = groups * cp.d_state
    outputs = []
    rows = proj[None] if packed else proj
    lengths = [rows.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    for piece in rows.split([n for n in lengths if n], dim=1):
        z, xBC, dt = piece.split([inner, inner + 2 * of_groups, heads], dim=-1)
        weight, bias = cp.get_conv1d_weight(), cp.get_conv1d_bias()
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
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * mixer.norm.weight
    return _linear(mixer.out_proj, y)


def _linear(module, x):
    return F.linear(x, module.weight)


def adapter_equals_the_mixer(kind: str, cp_size: int, groups: int, lengths=None) -> None:
    """The adapter around another's mixer, its own forward on one rank being what is expected."""
    with parallel(cp=cp_size), without_mamba_ssm():
        if kind == "megatron":
            torch.manual_seed(11)
            config = mamba_config(mamba_num_groups=groups, **HF_SIZES)
            mixer = _theirs(config, alone())
        else:
            mixer = hf_mixer(kind, groups)
        group = groups_of_megatron().cp
        cp = MambaContextParallel(group, 8, 5, groups, 6, mixer)
        tokens, batch = (32, 2) if lengths is None else (sum(lengths), 1)
        x, weight = torch.randn(2, batch, tokens, D)
        whole = x.clone().requires_grad_()

        def alone_forward(u):
            if kind == "megatron":
                return mixer(u.transpose(0, 1))[0].transpose(0, 1)
            return mixer(u)

        expected = torch.cat([alone_forward(u) for u in whole.split(
            [tokens] if lengths is None else [n for n in lengths if n], dim=1)], dim=1)  # fmt: skip
        (expected * weight).sum().backward()
        wanted = {name: p.grad.clone() for name, p in mixer.named_parameters()}
        for parameter in mixer.parameters():
            parameter.grad = None

        mine = local_indices(lengths or (tokens,), cp_size, group.rank())
        leaf = x[:, mine].requires_grad_()
        cu_seqlens = None
        if lengths is not None:
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        y = run_with(cp, mixer, leaf if lengths is None else leaf[0], cu_seqlens)
        (y * (weight[:, mine] if lengths is None else weight[0, mine])).sum().backward()
        assert_close("output", y.reshape(leaf.shape), expected[:, mine], TOLERANCE)
        assert_close("input", leaf.grad, whole.grad[:, mine], TOLERANCE)
        for name, parameter in mixer.named_parameters():
            total = parameter.grad.clone()
            torch.distributed.all_reduce(total, group=group)
            assert_close(name, total, wanted[name], TOLERANCE)
