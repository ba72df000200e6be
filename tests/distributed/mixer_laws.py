"""Run on every rank: what holds for every mixer, whole and in parallel."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import Float16Module

from megatron_gdn import SequenceLayout, set_documents, static_packed_seq_params
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import forward_backward, thd
from tests.parallel import (
    alone,
    assert_close,
    group_of_one,
    groups_of_megatron,
    in_ddp,
    parallel,
    reduce_gradients,
)
from tests.trees import Tree, separately
from tests.written_out import written_out


@dataclass(frozen=True)
class Mixers:
    """One kind of mixer.

    Attributes:
        config: a Megatron config with changes; its ``params_dtype`` is that of the law.
        build: ``(config, groups, **options)`` to the mixer.
        randomise: moves every parameter away from its initial value.
        share: ``(name, whole tensor, mixer)`` to this tensor-parallel rank's share.
        tolerance: largest difference of results over their largest entry.
        fp32: parameters that stay fp32 in a bf16 model.
    """

    config: Callable[..., Any]
    build: Callable[..., torch.nn.Module]
    randomise: Callable[[Any], None]
    share: Callable[[str, torch.Tensor, Any], torch.Tensor]
    tolerance: float
    fp32: tuple[str, ...]

    def whole(self, config, **options) -> torch.nn.Module:
        """The mixer of one rank, the same on all."""
        torch.manual_seed(7)
        mixer = self.build(config, alone(), **options)
        self.randomise(mixer)
        return mixer

    def copy_shares(self, mixer, one) -> None:
        with torch.no_grad():
            for name, parameter in mixer.named_parameters():
                parameter.copy_(self.share(name, one.get_parameter(name), mixer))


def parallel_equals_one_rank(
    mixers: Mixers,
    tp: int,
    cp: int,
    sequence_parallel: bool = False,
    *,
    batch: int = 2,
    tokens: int = 48,
    lengths: tuple[int, ...] | None = None,
    real_lengths: tuple[int, ...] | None = None,
    tree: Tree | None = None,
    layout: str = "zigzag",
    mode: str | None = None,
    own_cp_group: bool = False,
    fixed_buffers: bool = False,
    changes: dict | None = None,
    **options,
) -> None:
    """Output and every gradient; in deterministic mode twice, to the bit. ``lengths``
    are slots if ``real_lengths`` are given; under ``own_cp_group`` PackedSeqParams
    alone bring the group. With ``fixed_buffers`` the ranks' documents are written over
    the one document with which their tables were made."""
    if tree is not None:
        lengths = tree.slots
    if lengths is not None:
        tokens = sum(lengths)
        batch = 1
    changes = changes or {}

    def packed(**cp_group):
        params = None if lengths is None else thd(lengths, real_lengths=real_lengths)
        params = params if tree is None else tree.params
        for name, value in cp_group.items():
            setattr(params, name, value)
        return params

    def output(mixer, x, params):
        y, bias = mixer(x, packed_seq_params=params)
        return y if bias is None else y + bias

    with parallel(tp=tp, cp=cp):
        config = mixers.config(**changes)
        one = mixers.whole(config, **options)
        shape = (tokens, batch, config.hidden_size)
        dtype = config.params_dtype
        x, weight = (torch.randn(shape, dtype=dtype) for _ in "xw")
        x.requires_grad_()
        if tree is None:
            y = output(one, x, packed())
        else:
            y = separately(tree).run(
                x, lambda rows, lengths: output(one, rows, thd(lengths))
            )
            weight = tree.without_padding(weight)
        (y * weight).sum().backward()

        config = mixers.config(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=sequence_parallel,
            **changes,
        )
        groups = groups_of_megatron()
        brought = {}
        mine = local_indices(
            lengths or (tokens,), cp, groups.cp.rank(), SequenceLayout.parse(layout)
        )
        if sequence_parallel:
            mine = mine.chunk(tp)[groups.tp.rank()]
        if own_cp_group:
            brought = {"cp_group": groups.cp, "local_cp_size": cp}
            groups.cp = group_of_one()
        mixer = mixers.build(
            config, groups, cp_layout=layout, linear_cp_mode=mode, **options
        )
        mixers.copy_shares(mixer, one)
        ddp = in_ddp(mixer, grad_reduce_in_fp32=dtype == torch.float32)
        params = packed(**brought)
        if fixed_buffers:
            params = static_packed_seq_params(tokens, len(lengths), device="cpu")
            with torch.no_grad():
                output(ddp, x.detach()[mine], params)
            set_documents(params, thd(lengths).cu_seqlens_q)
        found = []
        for _repeat in range(2 if config.deterministic_mode else 1):
            ddp.zero_grad_buffer()
            x_mine = x.detach()[mine].requires_grad_()
            y_mine = output(ddp, x_mine, params)
            (y_mine * weight[mine]).sum().backward()
            reduce_gradients(ddp)
            grads = [p.main_grad.clone() for p in mixer.parameters()]
            y_mine = (
                y_mine.detach()
                if tree is None
                else y_mine.detach() * (weight[mine] != 0)
            )
            found.append([y_mine, x_mine.grad, *grads])
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))
        assert_close("output", found[0][0], y[mine], mixers.tolerance)
        assert_close("input gradient", found[0][1], x.grad[mine], mixers.tolerance)
        for (name, _), grad in zip(mixer.named_parameters(), found[0][2:], strict=True):
            expected = mixers.share(name, one.get_parameter(name).grad, mixer)
            assert expected.abs().max() > 0, f"{name}: no gradient to compare"
            assert_close(f"gradient of {name}", grad, expected, mixers.tolerance)


def equals_written_out(mixer, lengths=None, tokens: int = 70, added=None) -> None:
    """Output and every gradient are those of the mixer written out, all in fp64."""
    tokens, batch = (tokens, 2) if lengths is None else (sum(lengths), 1)
    shape = tokens, batch, mixer.config.hidden_size
    x, weight = (torch.randn(shape, dtype=torch.float64) for _ in "xw")
    exact = x.clone().requires_grad_()
    expected, parameters = written_out(mixer, exact, lengths or (tokens,), added)
    (expected * weight).sum().backward()
    packed = None if lengths is None else thd(lengths)
    found = forward_backward(mixer, x, packed, weight=weight)
    tolerance = 1e-11  # sums of some hundred terms that partly cancel, at 1e-16 each
    assert_close("output", found.pop("output"), expected, tolerance)
    assert_close("input gradient", found.pop("input"), exact.grad, tolerance)
    for name, grad in found.items():
        expected = parameters[name].grad
        assert expected.abs().max() > 0, f"{name}: no gradient to compare"
        assert_close(f"gradient of {name}", grad, expected, tolerance)


def starts_as_one_rank(mixers: Mixers) -> None:
    """Tensor-parallel ranks start with their shares of what one rank starts with, so
    they share replicated weights too."""
    with parallel(tp=2):
        torch.manual_seed(3)
        one = mixers.build(mixers.config(), alone())
        torch.manual_seed(3)
        config = mixers.config(tensor_model_parallel_size=2)
        mixer = mixers.build(config, groups_of_megatron())
        for name, parameter in mixer.named_parameters():
            expected = mixers.share(name, one.get_parameter(name), mixer)
            assert torch.equal(parameter, expected), name


def checkpoint_law(mixers: Mixers) -> None:
    """Saved at tp 2, loaded at tp 1, bit for bit; in bf16 with its fp32 parameters."""
    in_a_shared_folder(lambda folder: _checkpoint_moves(mixers, folder))


def _checkpoint_moves(mixers: Mixers, folder: str) -> None:
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}

    def cast(config, mixer):
        return Float16Module(config, mixer).module

    with parallel(tp=2):
        one = cast(mixers.config(**bf16), mixers.whole(mixers.config(**bf16)))
        config = mixers.config(tensor_model_parallel_size=2, **bf16)
        mixer = cast(config, mixers.build(config, groups_of_megatron()))
        for name, parameter in mixer.named_parameters():
            wide = name in mixers.fp32
            assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
        mixers.copy_shares(mixer, one)
        dist_checkpointing.save(mixer.sharded_state_dict(), folder)
    with parallel(tp=1):
        config = mixers.config(**bf16)
        mixer = cast(config, mixers.build(config, groups_of_megatron()))
        loaded = dist_checkpointing.load(mixer.sharded_state_dict(), folder)
        mixer.load_state_dict(loaded)
        for name, parameter in mixer.named_parameters():
            assert torch.equal(parameter, one.get_parameter(name)), name


def in_a_shared_folder(function) -> None:
    """Rank 0 makes a folder that all ranks use."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    function(name[0])
