"""Lengths for which Megatron's rotary positions raise are refused in words."""

import pytest
import torch

from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.parallel import hybrid_model, model_config
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
