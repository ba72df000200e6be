"""What a Gated DeltaNet layer keeps for its backward, in bytes."""

from __future__ import annotations

from ..mixers.gdn.sizes import GDNDims
from .stack import CHUNK


def saved_bytes(
    dims: GDNDims,
    *,
    tp: int = 1,
    recompute_qkv: bool = False,
    recompute_norm_out: bool = False,
    recompute_layer: bool = False,
) -> int:
    """Per token of a bf16 layer with flash_qla or fla, on one tensor-parallel rank.

    With sequence parallelism, as in every launch of the pages. Where `flash_qla` cuts long
    sequences into parts it keeps their states too: 16 MiB for 32768 tokens of 32 heads.

    Args:
        dims: of the whole layer.
        recompute_qkv, recompute_norm_out: the layer's options.
        recompute_layer: ``--recompute-modules gdn`` of Megatron's dev: the input alone is kept.
    """
    share = dims.shard(tp)
    rows, kept = share.layout.width, 2 * dims.hidden_size // tp  # bf16: of the input of in_proj
    if recompute_layer:
        return kept
    kept += 2 * rows + 2 * share.v_dim  # in_proj's output; o
    kept += share.num_value_heads * (2 * CHUNK + 2 * 4)  # inverses; the sum of g and beta in fp32
    if not recompute_qkv:
        kept += 2 * (share.qk_dim + share.v_dim)  # k and v: q is always computed again
    if not recompute_norm_out:
        kept += 2 * share.v_dim  # the input of out_proj
    return kept
