"""Run on every rank: a Mamba2 mixer whole and in parallel."""

from dataclasses import replace

import torch

from megatron_gdn.mamba2.layer import GroupedRMSNorm
from tests.distributed.layer_laws import thd
from tests.distributed.mixer_laws import groups_of_megatron, parallel_equals_one_rank
from tests.distributed.mixers import MAMBA2
from tests.mamba_mixers import (
    D,
    alone,
    build,
    mamba_config,
    share_of,
    whole_mixer,
    written_out,
)
from tests.parallel import assert_close, parallel

FP64 = {"params_dtype": torch.float64}
TOLERANCE = MAMBA2.tolerance


def mixer_equals_tokens(lengths=None, sizes=None, **options) -> None:
    """Output and every gradient of one rank's mixer are those of the recurrence, all in fp64."""
    with parallel():
        mixer = whole_mixer(mamba_config(**FP64, **(sizes or {})), **options)
        tokens, batch = (70, 2) if lengths is None else (sum(lengths), 1)
        x = torch.randn(tokens, batch, D, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(tokens, batch, D, dtype=torch.float64)
        expected, parameters = written_out(mixer, x, lengths or (tokens,))
        (expected * weight).sum().backward()
        ours = x.detach().requires_grad_()
        y, bias = mixer(ours, packed_seq_params=None if lengths is None else thd(lengths))
        assert bias is None
        (y * weight).sum().backward()
        assert_close("output", y, expected, TOLERANCE)
        assert_close("input gradient", ours.grad, x.grad, TOLERANCE)
        for name, parameter in mixer.named_parameters():
            expected = parameters[name].grad
            assert expected.abs().max() > 0, f"{name}: no gradient to compare"
            assert_close(f"gradient of {name}", parameter.grad, expected, TOLERANCE)


def same_start_at_every_size() -> None:
    """Tensor-parallel ranks start with their shares of what one rank starts with."""
    with parallel(tp=2):
        torch.manual_seed(3)
        one = build(mamba_config(), alone())
        torch.manual_seed(3)
        mixer = build(mamba_config(tensor_model_parallel_size=2), groups_of_megatron())
        for name, parameter in mixer.named_parameters():
            assert torch.equal(parameter, share_of(name, one.get_parameter(name), mixer)), name


class Louder(GroupedRMSNorm):
    """The norm and something more of what it is given."""

    def forward(self, x, gate=None):
        return super().forward(x, gate) + more(x, gate)


def more(x, gate):
    return torch.tanh(x) * torch.cos(gate)


def _replaced(norm) -> None:
    plain = norm.forward
    norm.forward = lambda x, gate=None: plain(x, gate) + more(x, gate)


CHANGES = {
    "subclass": lambda norm: setattr(norm, "__class__", Louder),
    "forward": _replaced,
    "hook": lambda norm: norm.register_forward_hook(lambda _, args, out: out + more(*args)),
}


def a_changed_norm_counts(change: str, lengths=None) -> None:
    """What it adds is of the recurrence's output and of the gate, in fp64, with its gradients."""
    with parallel():
        mixer = whole_mixer(mamba_config(**FP64))
        CHANGES[change](mixer.norm)
        tokens, batch = (70, 2) if lengths is None else (sum(lengths), 1)
        x = torch.randn(tokens, batch, D, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(tokens, batch, D, dtype=torch.float64)
        expected, parameters = written_out(mixer, x, lengths or (tokens,), added=more)
        (expected * weight).sum().backward()
        ours = x.detach().requires_grad_()
        y, _ = mixer(ours, packed_seq_params=None if lengths is None else thd(lengths))
        (y * weight).sum().backward()
        assert_close("output", y, expected, TOLERANCE)
        assert_close("input gradient", ours.grad, x.grad, TOLERANCE)
        for name, parameter in mixer.named_parameters():
            assert_close(f"gradient of {name}", parameter.grad, parameters[name].grad, TOLERANCE)


def a_changed_norm_counts_in_parallel(tp: int, cp: int, change: str, **kwargs) -> None:
    """It gets the channels of whole groups, whatever an exchange does to their heads."""

    def build_changed(*args, **options):
        mixer = build(*args, **options)
        CHANGES[change](mixer.norm)
        return mixer

    parallel_equals_one_rank(replace(MAMBA2, build=build_changed), tp, cp, **kwargs)
