"""What laws of one Gated DeltaNet need: the layer, its random values, packed documents."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.context_parallel import Chunkwise
from megatron_gdn.specs import gated_delta_net_spec


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
