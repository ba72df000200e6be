"""Run on every rank: what holds for every mixer, whole and in parallel.

A mixer brings how it is built, shared out and compared (:class:`Mixers`); the rest is here.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import thd
from tests.parallel import assert_close, parallel


@dataclass(frozen=True)
class Mixers:
    """One kind of mixer.

    Attributes:
        config: with changes to a Megatron config.
        whole: the mixer of one rank, the same on all, every parameter away from its start.
        build: of a config, groups and the options of context parallelism.
        share: ``(name, whole tensor, mixer)`` to this tensor-parallel rank's share.
        hidden, dtype, tolerance: of the rows, and what results may differ by.
        fp32: parameters that stay fp32 in a bf16 model.
        finish: what a model does to gradients after DDP, if anything.
    """

    config: Callable[..., Any]
    whole: Callable[[Any], torch.nn.Module]
    build: Callable[..., torch.nn.Module]
    share: Callable[[str, torch.Tensor, Any], torch.Tensor]
    hidden: int
    dtype: torch.dtype
    tolerance: float
    fp32: tuple[str, ...]
    finish: Callable[[DistributedDataParallel, int], None] = lambda ddp, tp: None


def groups_of_megatron() -> ProcessGroupCollection:
    return ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
    )


def _copy_shares(mixers: Mixers, mixer, one) -> None:
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.copy_(mixers.share(name, one.get_parameter(name), mixer))


def parallel_equals_one_rank(
    mixers: Mixers,
    tp: int,
    cp: int,
    sequence_parallel: bool = False,
    lengths: tuple[int, ...] | None = None,
    layout: str = "zigzag",
    mode: str | None = None,
) -> None:
    """Output, input gradient and every parameter's gradient, run twice with equal bits."""
    tokens, batch = (32, 2) if lengths is None else (sum(lengths), 1)
    tolerance, in_fp32 = mixers.tolerance, mixers.dtype == torch.float32

    def packed():
        return None if lengths is None else thd(lengths)

    with parallel(tp=tp, cp=cp):
        one = mixers.whole(mixers.config())
        x, weight = (torch.randn(tokens, batch, mixers.hidden, dtype=mixers.dtype) for _ in "xw")
        x.requires_grad_()
        y, _ = one(x, packed_seq_params=packed())
        (y * weight).sum().backward()

        config = mixers.config(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=sequence_parallel,
            deterministic_mode=True,
        )
        groups = groups_of_megatron()
        mixer = mixers.build(config, groups, cp_layout=layout, linear_cp_mode=mode)
        _copy_shares(mixers, mixer, one)
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32), mixer
        )
        mine = local_indices(
            lengths or (tokens,), cp, groups.cp.rank(), SequenceLayout.parse(layout)
        )
        if sequence_parallel:
            mine = mine.chunk(tp)[groups.tp.rank()]
        found = []
        for _repeat in range(2):
            ddp.zero_grad_buffer()
            x_mine = x.detach()[mine].requires_grad_()
            out, _ = ddp(x_mine, packed_seq_params=packed())
            (out * weight[mine]).sum().backward()
            ddp.finish_grad_sync()
            mixers.finish(ddp, tp)
            grads = [p.main_grad.clone() for p in mixer.parameters()]
            found.append([out.detach(), x_mine.grad, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert_close("output", found[0][0], y[mine], tolerance)
        assert_close("input gradient", found[0][1], x.grad[mine], tolerance)
        for (name, _), grad in zip(mixer.named_parameters(), found[0][2:], strict=True):
            expected = mixers.share(name, one.get_parameter(name).grad, mixer)
            assert expected.abs().max() > 0, f"{name}: no gradient to compare"
            assert_close(f"gradient of {name}", grad, expected, tolerance)


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
        _copy_shares(mixers, mixer, one)
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
