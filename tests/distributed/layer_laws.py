"""Run on every rank by the tests beside this file: one layer, whole and in parallel."""

from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import Chunkwise, local_indices
from megatron_gdn.mixers import micro_batch
from megatron_gdn.specs import gated_delta_net_spec
from tests.parallel import assert_close, group_of_one, make_config, parallel, share_of


def by_way_of(exchange: str | None):
    """``Chunkwise`` whose maps travel that way whatever it is asked for; None lets it be."""

    def make(*args, **options):
        *args, asked = args
        return Chunkwise(*args, asked if exchange is None else exchange, **options)

    return make


def thd(lengths, device="cpu", real_lengths=None) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int()
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    if real_lengths is None:
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, **longest)
    real = torch.tensor([0, *real_lengths], dtype=torch.int32, device=device).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        **longest,
    )


def build_layer(config, pg_collection, options):
    return build_module(
        gated_delta_net_spec("local", **options),
        config,
        layer_number=1,
        pg_collection=pg_collection,
    )


def randomise_(layer) -> None:
    """Give every parameter its own random values, norm weights and biases included."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def parallel_equals_one_rank(
    tp: int,
    cp: int,
    sequence_parallel: bool = False,
    batch: int = 2,
    lengths: tuple[int, ...] | None = None,
    real_lengths: tuple[int, ...] | None = None,
    tokens: int = 48,
    layout: str = "zigzag",
    sizes: dict | None = None,
    tolerance: float = 1e-5,
    own_cp_group: bool = False,
    config_mode: str | None = None,
    exchange: str | None = None,
    **options,
) -> dict[str, float]:
    """Output, input gradient and every parameter's gradient equal one rank's.

    ``lengths`` packs documents; ``own_cp_group`` hands the context-parallel group over through
    ``PackedSeqParams`` to a layer that was built without one; ``config_mode`` is the config's
    ``linear_cp_mode``; ``exchange`` is how chunkwise sends its maps.
    """
    packed = None if lengths is None else thd(lengths, real_lengths=real_lengths)
    if lengths is not None:
        batch, tokens = 1, sum(lengths)
    changes = dict(sizes or {})
    recompute = changes.pop("recompute", False)
    if recompute:
        changes |= {
            "recompute_granularity": "selective",
            "recompute_modules": ["gdn_norm_out"],
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 1,
        }
    with parallel(tp=tp, cp=cp):
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        torch.manual_seed(7)
        one = build_layer(make_config(**changes), alone, options)
        randomise_(one)
        x = torch.randn(tokens, batch, one.hidden_size, requires_grad=True)
        weight = torch.randn(tokens, batch, one.hidden_size)
        y, bias = one(x, None, packed_seq_params=packed)
        y = y if bias is None else y + bias
        (y * weight).sum().backward()

        config = make_config(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=sequence_parallel,
            **changes,
        )
        cp_group = parallel_state.get_context_parallel_group()
        groups = ProcessGroupCollection(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=group_of_one() if own_cp_group else cp_group,
        )
        config.linear_cp_mode = config_mode
        with patch.object(micro_batch, "Chunkwise", by_way_of(exchange)):
            layer = build_layer(config, groups, {**options, "cp_layout": layout})
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share_of(name, one.get_parameter(name), layer))
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
        )
        mine = local_indices(
            lengths or (tokens,), cp, cp_group.rank(), SequenceLayout.parse(layout)
        )
        if sequence_parallel:
            mine = mine.chunk(tp)[groups.tp.rank()]
        x_mine = x.detach()[mine].requires_grad_()
        packed_mine = None if lengths is None else thd(lengths, real_lengths=real_lengths)
        if own_cp_group:
            packed_mine.cp_group, packed_mine.local_cp_size = cp_group, cp
        y_mine, bias = ddp(x_mine, None, packed_seq_params=packed_mine)
        y_mine = y_mine if bias is None else y_mine + bias
        (y_mine * weight[mine]).sum().backward()
        ddp.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([ddp], config)

        assert_close("output", y_mine, y[mine], tolerance)
        assert_close("input gradient", x_mine.grad, x.grad[mine], tolerance)
        for name, parameter in layer.named_parameters():
            if name == "out_proj.bias" and not sequence_parallel and bias is not None:
                pass  # every tensor-parallel rank adds it; its gradient is already whole
            expected = share_of(name, one.get_parameter(name).grad, layer)
            assert expected.abs().max() > 0, f"{name}: no gradient to compare"
            assert_close(f"gradient of {name}", parameter.main_grad, expected, tolerance)
