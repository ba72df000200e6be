"""Run on every rank: the toy mixer whole and in parallel."""

import tempfile

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.init import take_share
from tests.distributed.layer_laws import randomise_, thd
from tests.parallel import assert_close, group_of_one, make_config, parallel
from tests.toy_mixer import HIDDEN, LAYOUT, H, ToyMixer, V


def share_of(name: str, whole: torch.Tensor, groups: ProcessGroupCollection) -> torch.Tensor:
    """This tensor-parallel rank's share of a whole parameter (or of its gradient)."""
    split = {
        "in_proj.weight": (0, LAYOUT.widths),
        "conv1d.weight": (0, LAYOUT.conv_widths),
        "decay_bias": (0, (H,)),
        "out_proj.weight": (1, (H * V,)),
    }.get(name)
    return whole if split is None else take_share(whole, *split, groups.tp.rank(), groups.tp.size())


def groups_of_megatron() -> ProcessGroupCollection:
    return ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
    )


def whole_layer(config) -> ToyMixer:
    torch.manual_seed(7)
    layer = ToyMixer(config, ProcessGroupCollection(tp=group_of_one(), cp=group_of_one()))
    randomise_(layer)
    return layer


def toy_equals_one_rank(
    tp: int,
    cp: int,
    sequence_parallel: bool = False,
    lengths: tuple[int, ...] | None = None,
    layout: str = "zigzag",
    mode: str | None = None,
) -> None:
    """Output, input gradient and every parameter's gradient, run twice with equal bits."""
    tokens, batch = (32, 2) if lengths is None else (sum(lengths), 1)
    with parallel(tp=tp, cp=cp):
        one = whole_layer(make_config())
        x, weight = (torch.randn(tokens, batch, HIDDEN) for _ in range(2))
        x.requires_grad_()
        packed = None if lengths is None else thd(lengths)
        y, _ = one(x, None, packed_seq_params=packed)
        (y * weight).sum().backward()

        config = make_config(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=sequence_parallel,
            deterministic_mode=True,
        )
        groups = groups_of_megatron()
        layer = ToyMixer(config, groups, cp_layout=layout, linear_cp_mode=mode)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share_of(name, one.get_parameter(name), groups))
        # The norm is used by every tensor-parallel rank on its own heads.
        layer.out_norm.weight.sequence_parallel = True
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
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
            out, _ = ddp(x_mine, None, packed_seq_params=None if packed is None else thd(lengths))
            (out * weight[mine]).sum().backward()
            ddp.finish_grad_sync()
            with_norm = make_config(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
            _allreduce_non_tensor_model_parallel_grads([ddp], with_norm)
            grads = [p.main_grad.clone() for p in layer.parameters()]
            found.append([out.detach(), x_mine.grad, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert_close("output", found[0][0], y[mine], 1e-5)
        assert_close("input gradient", found[0][1], x.grad[mine], 1e-5)
        for (name, _), grad in zip(layer.named_parameters(), found[0][2:], strict=True):
            expected = share_of(name, one.get_parameter(name).grad, groups)
            assert expected.abs().max() > 0, f"{name}: no gradient to compare"
            assert_close(f"gradient of {name}", grad, expected, 1e-5)


def toy_checkpoint_moves(folder: str) -> None:
    """Saved at tp 2, loaded at tp 1, bit for bit; in bf16 with its fp32 parameter."""
    with parallel(tp=2):
        config = make_config(tensor_model_parallel_size=2, bf16=True, params_dtype=torch.bfloat16)
        one = Float16Module(config, whole_layer(config)).module
        layer = Float16Module(config, ToyMixer(config, groups_of_megatron())).module
        assert layer.decay_bias.dtype == torch.float32
        assert layer.in_proj.weight.dtype == torch.bfloat16
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share_of(name, one.get_parameter(name), groups_of_megatron()))
        dist_checkpointing.save(layer.sharded_state_dict(), folder)
    with parallel(tp=1):
        config = make_config(bf16=True, params_dtype=torch.bfloat16)
        layer = Float16Module(config, ToyMixer(config, groups_of_megatron())).module
        loaded = dist_checkpointing.load(layer.sharded_state_dict(), folder)
        layer.load_state_dict(loaded)
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, one.get_parameter(name)), name


def in_a_shared_folder(function) -> None:
    """Rank 0 makes a folder that all ranks use."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    function(name[0])


def checkpoint_law() -> None:
    in_a_shared_folder(toy_checkpoint_moves)
