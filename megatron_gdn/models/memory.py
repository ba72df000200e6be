"""What a Gated DeltaNet layer keeps for its backward, in bytes."""

from __future__ import annotations

from ..mixers.gdn.recompute import LEVELS
from ..mixers.gdn.sizes import GDNDims
from .stack import CHUNK


def saved_bytes(
    dims: GDNDims,
    *,
    tp: int = 1,
    recompute: str = "none",
    recompute_layer: bool = False,
) -> int:
    """Per token of a bf16 layer with flash_qla or fla, on one tensor-parallel rank.

    With sequence parallelism, as in every launch of the pages. Where `flash_qla` cuts long
    sequences into parts it keeps their states too: 16 MiB for 32768 tokens of 32 heads.

    Args:
        dims: of the whole layer.
        recompute: the layer's option, ``"none"``, ``"light"`` or ``"full"``.
        recompute_layer: ``--recompute-modules gdn`` of Megatron's dev: the input alone is kept.
    """
    share = dims.shard(tp)
    rows, kept = share.layout.width, 2 * dims.hidden_size // tp  # bf16: of the input of in_proj
    if recompute_layer:
        return kept
    again = LEVELS[recompute]
    kept += 2 * rows  # in_proj's output
    if "rule" not in again:
        kept += 2 * share.v_dim  # o
        kept += share.num_value_heads * (2 * CHUNK + 2 * 4)  # inverses; sum of g and beta in fp32
    if "qkv" not in again:
        kept += 2 * (share.qk_dim + share.v_dim)  # k and v: q is always computed again
    if "norm_out" not in again:
        kept += 2 * share.v_dim  # the input of out_proj
    return kept
