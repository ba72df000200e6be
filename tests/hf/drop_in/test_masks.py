"""4-D masks of any dtype keep documents apart in a patched model and agree with other sources."""

import pytest
import torch

from megatron_gdn.hf import patch
from tests.hf.drop_in.conftest import DENSE
from tests.hf.drop_in.test_sources import block_mask
from tests.parallel import assert_close

IDS = [[1, 1, 1, 1, 1, 2, 2, 3, 3]]
SPANS = ((0, 5), (5, 7), (7, 9))
TOKENS = torch.randint(67, (1, 9), generator=torch.Generator().manual_seed(1))


def as_added(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)


KINDS = {"bool": lambda mask: mask, "int": lambda mask: mask.int(), "added": as_added}


@pytest.fixture(params=["eager", "sdpa"])
def model(fresh, request):
    """float64, but for transformers' norms and rotations."""
    model = fresh(DENSE).double()
    model.set_attn_implementation(request.param)
    patch(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_causal_mask_keeps_documents_apart(model, kind):
    mask = KINDS[kind](block_mask(IDS))
    alone = [model(TOKENS[:, start:end], use_cache=False).logits for start, end in SPANS]
    forms = (
        {"attention_mask": mask},
        {"attention_mask": mask, "_packed_seq_ids": torch.tensor(IDS)},
        {"attention_mask": {"full_attention": mask, "linear_attention": torch.tensor(IDS)}},
    )
    for told in forms:
        logits = model(TOKENS, use_cache=False, **told).logits
        assert_close("logits", logits, torch.cat(alone, 1), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_mask_is_no_mask(model, kind):
    mask = KINDS[kind](block_mask([[1] * 9]))
    expected = model(TOKENS, use_cache=False).logits
    assert_close(
        "whole", model(TOKENS, attention_mask=mask, use_cache=False).logits, expected, 1e-5
    )
    cache = model(TOKENS[:, :8], attention_mask=mask[..., :8, :8], use_cache=True).past_key_values
    step = model(TOKENS[:, 8:], attention_mask=mask[..., 8:, :], past_key_values=cache).logits
    assert_close("a step on a cache", step, expected[:, 8:], 1e-5)
    layer, x = model.model.layers[0].linear_attn, torch.randn(1, 9, 24, dtype=torch.float64)
    assert torch.equal(layer(x, attention_mask=mask), layer(x))


def test_a_mask_that_does_not_isolate_what_others_name_is_refused(model):
    mask = block_mask([[1] * 9])
    positions = torch.cat([torch.arange(end - start) for start, end in SPANS])[None]
    offsets = torch.tensor([0, 5, 7, 9])
    for told in (
        {"_packed_seq_ids": torch.tensor(IDS)},
        {"position_ids": positions},
        {"cu_seq_lens_q": offsets},
        {"cu_seqlens": offsets},
    ):
        with pytest.raises(ValueError, match=r"\(4-D\) and .* boundaries"):
            model(TOKENS, attention_mask=mask, **told)
    with pytest.raises(ValueError, match="is added to scores.* Pass a bool mask"):
        model(TOKENS, attention_mask=block_mask(IDS).double())
