"""Lengths for which Megatron's rotary positions raise are refused in words."""

from functools import partial

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn.mixers.packing import TREE_FORMAT
from megatron_gdn.mixers.rotary_lengths import explain_rotary_lengths
from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.parallel import group_of_one, hybrid_model, make_config, model_config
from tests.ranks import on_ranks


def run(
    cp: int, tokens: int, packed=None, layout="contiguous", pattern="G*"
) -> torch.Tensor:
    """A model's logits of this rank's share of the tokens."""
    config = model_config(pattern, context_parallel_size=cp)
    spec = hybrid_stack_spec("local", cp_layout=layout)
    model = hybrid_model(config, pattern, spec, position_embedding_type="rope")
    ids = torch.arange(tokens // cp)[None]
    return model(ids, ids, None, packed_seq_params=packed)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag_buffer"])
@pytest.mark.parametrize("pattern", ["G*", "G"])
@on_ranks(cp=2)
def test_a_batch_whose_angles_cannot_be_cut_is_told_the_length(layout, pattern):
    said = r"not packed has 10 tokens over 2 .* multiple of 4 tokens \(pad to 12\)"
    with pytest.raises(ValueError, match=said):
        run(2, 10, layout=layout, pattern=pattern)
    assert run(2, 12, layout=layout, pattern=pattern).isfinite().all()


@on_ranks(cp=2)
def test_the_angles_of_packed_documents_are_not_cut():
    packed = thd((3, 7))
    assert run(2, 10, packed).isfinite().all()


@pytest.mark.parametrize(
    "missing", [("max_seqlen_q",), ("max_seqlen_q", "max_seqlen_kv")]
)
@on_ranks(cp=1)
def test_a_forgotten_length_of_the_longest_document_is_named(missing):
    packed = thd((3, 7))
    for name in missing:
        setattr(packed, name, None)
    with pytest.raises(ValueError, match="has max_seqlen_q=None.*longest document"):
        run(1, 10, packed)


@on_ranks(cp=1)
def test_lengths_that_megatron_does_not_cut_or_cuts_for_other_ranks_are_free():
    explain_rotary_lengths()
    rotary = RotaryEmbedding(
        6, 1.0, use_cpu_initialization=True, cp_group=group_of_one()
    )
    length_of = partial(
        rotary.get_rotary_seq_len,
        transformer=None,
        transformer_input=torch.zeros(5, 1, 24),
        transformer_config=make_config(context_parallel_size=2),
    )
    context = StaticInferenceContext(1, 9)
    assert length_of(context) == 18
    assert length_of(None, inference_params=context) == 18
    sizes = {"max_seqlen_q": 5, "max_seqlen_kv": 5}
    packed = PackedSeqParams(qkv_format="sbhd", local_cp_size=1, **sizes)
    assert length_of(None, packed_seq_params=packed) == 5
    for name in ("sbhd", TREE_FORMAT):
        packed = PackedSeqParams(qkv_format=name, **sizes)
        with pytest.raises(ValueError, match="max_seqlen_q is 5 tokens over 2 .* to 8"):
            length_of(None, packed_seq_params=packed)
