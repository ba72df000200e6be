"""Run on every rank: a Mamba2 mixer whole and in parallel."""

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import thd
from tests.distributed.toy_laws import in_a_shared_folder
from tests.mamba_mixers import (
    D,
    build,
    mamba_config,
    share_of,
    whole_mixer,
    written_out,
)
from tests.parallel import assert_close, parallel

FP64 = {"params_dtype": torch.float64}
# Sums of some hundred terms that partly cancel, at 1e-16 each.
TOLERANCE = 1e-11


def groups_of_megatron() -> ProcessGroupCollection:
    return ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
    )


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


def parallel_equals_one_rank(
    tp: int,
    cp: int,
    sequence_parallel: bool = False,
    lengths: tuple[int, ...] | None = None,
    layout: str = "zigzag",
    mode: str | None = None,
    sizes: dict | None = None,
    **options,
) -> None:
    """Output, input gradient and every parameter's gradient, run twice with equal bits."""
    sizes = {**FP64, **(sizes or {})}
    tokens, batch = (32, 2) if lengths is None else (sum(lengths), 1)
    with parallel(tp=tp, cp=cp):
        one = whole_mixer(mamba_config(**sizes), **options)
        x, weight = (torch.randn(tokens, batch, D, dtype=torch.float64) for _ in range(2))
        x.requires_grad_()
        y, _ = one(x, packed_seq_params=None if lengths is None else thd(lengths))
        (y * weight).sum().backward()

        config = mamba_config(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=sequence_parallel,
            deterministic_mode=True,
            **sizes,
        )
        groups = groups_of_megatron()
        mixer = build(config, groups, cp_layout=layout, linear_cp_mode=mode, **options)
        with torch.no_grad():
            for name, parameter in mixer.named_parameters():
                parameter.copy_(share_of(name, one.get_parameter(name), mixer))
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), mixer)
        mine = local_indices(
            lengths or (tokens,), cp, groups.cp.rank(), SequenceLayout.parse(layout)
        )
        if sequence_parallel:
            mine = mine.chunk(tp)[groups.tp.rank()]
        found = []
        for _repeat in range(2):
            ddp.zero_grad_buffer()
            x_mine = x.detach()[mine].requires_grad_()
            out, _ = ddp(x_mine, packed_seq_params=None if lengths is None else thd(lengths))
            (out * weight[mine]).sum().backward()
            ddp.finish_grad_sync()
            grads = [p.main_grad.clone() for p in mixer.parameters()]
            found.append([out.detach(), x_mine.grad, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert_close("output", found[0][0], y[mine], TOLERANCE)
        assert_close("input gradient", found[0][1], x.grad[mine], TOLERANCE)
        for (name, _), grad in zip(mixer.named_parameters(), found[0][2:], strict=True):
            expected = share_of(name, one.get_parameter(name).grad, mixer)
            assert expected.abs().max() > 0, f"{name}: no gradient to compare"
            assert_close(f"gradient of {name}", grad, expected, TOLERANCE)


def same_start_at_every_size() -> None:
    """Tensor-parallel ranks start with their shares of what one rank starts with."""
    with parallel(tp=2):
        torch.manual_seed(3)
        from tests.mamba_mixers import alone

        one = build(mamba_config(), alone())
        torch.manual_seed(3)
        mixer = build(mamba_config(tensor_model_parallel_size=2), groups_of_megatron())
        for name, parameter in mixer.named_parameters():
            assert torch.equal(parameter, share_of(name, one.get_parameter(name), mixer)), name


def _checkpoint_moves(folder: str) -> None:
    """Saved at tp 2, loaded at tp 1, bit for bit; in bf16 with its fp32 parameters."""
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
    with parallel(tp=2):
        one = Float16Module(mamba_config(**bf16), whole_mixer(mamba_config(**bf16))).module
        config = mamba_config(tensor_model_parallel_size=2, **bf16)
        mixer = Float16Module(config, build(config, groups_of_megatron())).module
        with torch.no_grad():
            for name, parameter in mixer.named_parameters():
                wide = name in ("A_log", "dt_bias", "D")
                assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
                parameter.copy_(share_of(name, one.get_parameter(name), mixer))
        state = mixer.sharded_state_dict()
        dist_checkpointing.save(state, folder)
    with parallel(tp=1):
        mixer = Float16Module(
            mamba_config(**bf16), build(mamba_config(**bf16), groups_of_megatron())
        )
        mixer = mixer.module
        loaded = dist_checkpointing.load(mixer.sharded_state_dict(), folder)
        mixer.load_state_dict(loaded)
        for name, parameter in mixer.named_parameters():
            assert torch.equal(parameter, one.get_parameter(name)), name


def checkpoint_law() -> None:
    in_a_shared_folder(_checkpoint_moves)
