"""A Gated DeltaNet between its projections as one call, from its tensors."""

from torch import Tensor

from megatron_gdn.gdn.sizes import GDNDims
from megatron_gdn.inference import gdn_rows
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.documents import Documents, require_one_row
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.readout.base import PassThroughReadout, SplitReadout, view_heads
from megatron_gdn.ops.recompute import RefilledOutput
from megatron_gdn.ops.rules.base import Rule
from megatron_gdn.ops.stages import WHOLE_SEQUENCES, GatedNorm, SequenceContext


def gdn_dims(hidden, key_heads, value_heads, key_dim, value_dim, taps=4) -> GDNDims:
    sizes = {
        "key_head_dim": key_dim,
        "value_head_dim": value_dim,
        "conv_kernel_dim": taps,
    }
    heads = {"num_key_heads": key_heads, "num_value_heads": value_heads}
    return GDNDims(hidden_size=hidden, **heads, **sizes)


def gated_delta_mixer(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    rule: Rule,
    norm: GatedNorm | None,
    documents: Documents | None = None,
    sequence_context: SequenceContext | None = None,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    recompute_qkv: bool = False,
    recompute_rule: bool = False,
    refilled: RefilledOutput | None = None,
    kernels: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`mix` of :func:`gdn_rows`; without ``norm`` o and z, both
    ``[B, S, H, V]``."""
    if norm is None and refilled is not None:
        raise ValueError("refilled repeats the gated norm, so it needs norm.")
    gate = sizes.layout.gate_columns
    heads = sizes.value_heads
    plain = SplitReadout(PassThroughReadout(gate, heads), lambda o, _: o)
    stages = gdn_rows(
        proj,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        sizes.layout,
        rule=rule,
        norm=plain if norm is None else norm,
        normalise_qk=normalise_qk,
        allow_neg_eigval=allow_neg_eigval,
        recompute_qkv=recompute_qkv,
        recompute=recompute_rule,
        kernels=kernels,
    )
    if documents is not None:
        S, B = proj.shape[:2]
        require_one_row(B, f"a projection of shape {tuple(proj.shape)}")
        Documents.from_cu_seqlens(documents, S)
        assert sequence_context is None
        sequence_context = SequenceContext(documents)
    mixed = mix(
        proj,
        stages,
        WHOLE_SEQUENCES if sequence_context is None else sequence_context,
        refilled,
    )
    if norm is None:
        return view_heads(mixed, heads), view_heads(proj[..., gate], heads)
    return mixed
