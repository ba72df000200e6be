"""4-D masks of any dtype, and offsets with indices, keep documents of a patched model
apart."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from megatron_gdn import unpad_data
from megatron_gdn.context_parallel.gathered import LocalDocument
from megatron_gdn.hf import patch
from megatron_gdn.hf.drop_in.batch import ModelBatch, resolve_batch
from megatron_gdn.hf.drop_in.patching import (
    GATHERED_ATTENTION,
    _mask_of_documents,
    gathered_attention,
)
from megatron_gdn.hf.drop_in.sources import BoundarySources
from tests.hf.drop_in.conftest import DENSE, KIMI, NEXT, VISION, mixer_of
from tests.hf.drop_in.test_sources import block_mask
from tests.hf.tiny_models import cache_name
from tests.parallel import assert_close

IDS = [[1, 1, 1, 1, 1, 2, 2, 3, 3]]
SPANS = ((0, 5), (5, 7), (7, 9))
TOKENS = torch.randint(67, (1, 9), generator=torch.Generator().manual_seed(1))


def as_added(mask):
    """-1e4 is the greatest value that excludes a token."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e4)


KINDS = {"bool": lambda mask: mask, "int": lambda mask: mask.int(), "added": as_added}


@pytest.fixture(params=["eager", "sdpa"])
def model(fresh, request):
    """float64, but for transformers' norms and rotations."""
    model = fresh(DENSE).double()
    model.set_attn_implementation(request.param)
    patch(model)
    return model


def test_softmax_attention_gets_the_keywords_that_transformers_gives(fresh):
    """A function that a user registers may take no others."""
    got = []

    def watched(*args, **keywords):
        got.append(set(keywords))
        return sdpa_attention_forward(*args, **keywords)

    AttentionInterface.register("watched", watched)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model = fresh(DENSE)
    model.set_attn_implementation("watched")
    model(TOKENS, use_cache=False)
    theirs = len(got)
    patch(model)
    for told in ({}, {"_packed_seq_ids": torch.tensor(IDS)}):
        model(TOKENS, use_cache=False, **told)
    assert len(got) == 3 * theirs > 0
    assert all(keywords == got[0] for keywords in got), got


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_causal_mask_keeps_documents_apart(model, kind):
    mask = KINDS[kind](block_mask(IDS))
    alone = [
        model(TOKENS[:, start:end], use_cache=False).logits for start, end in SPANS
    ]
    forms = (
        {"attention_mask": mask},
        {"attention_mask": mask, "_packed_seq_ids": torch.tensor(IDS)},
        {
            "attention_mask": {
                "full_attention": mask,
                "linear_attention": torch.tensor(IDS),
            }
        },
        {"attention_mask": {"full_attention": mask, "linear_attention": None}},
        {
            "attention_mask": {
                "full_attention": mask,
                "linear_attention": torch.ones(1, 9),
            }
        },
        {"attention_mask": {"full_attention": mask}},
        {"attention_mask": {"full_attention": None, "linear_attention": mask}},
    )
    for told in forms:
        logits = model(TOKENS, use_cache=False, **told).logits
        assert_close("logits", logits, torch.cat(alone, 1), 1e-5)


def test_any_entry_of_a_dict_of_masks_names_the_documents(model):
    alone = [
        model(TOKENS[:, start:end], use_cache=False).logits for start, end in SPANS
    ]
    ids = torch.tensor(IDS)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1]])
    forms = (
        {"attention_mask": {"full_attention": ids}},
        {"attention_mask": {"full_attention": ids, "linear_attention": ids}},
        {"attention_mask": {"linear_attention": ids}},
        {"attention_mask": {"full_attention": None}, "position_ids": positions},
        {
            "attention_mask": {"full_attention": None, "linear_attention": None},
            "position_ids": positions,
        },
        {
            "attention_mask": {"full_attention": block_mask([[1] * 9])},
            "_packed_seq_ids": ids,
        },
        {"attention_mask": {}, "cu_seq_lens_q": torch.tensor([0, 5, 7, 9])},
    )
    for told in forms:
        logits = model(TOKENS, use_cache=False, **told).logits
        assert_close("logits", logits, torch.cat(alone, 1), 1e-5)


def test_masks_in_a_dict_that_name_no_documents_have_the_bits_of_transformers(fresh):
    """Also padding as transformers masks it: padding sees what is before it."""
    theirs = fresh(DENSE)
    ours = fresh(DENSE)
    patch(ours)
    tokens = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(2))
    causal = block_mask([[1] * 9] * 2)
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :3] = padding[1, 7:] = 0
    window = causal & ~causal.tril(-3)
    prefix = causal.clone()
    prefix[..., :4, :4] = True
    padded = causal & (padding[:, None, None] > 0)
    padded[0, :, :3] = True  # a row in which nothing is seen sees everything
    cases = (
        {"full_attention": causal, "linear_attention": None},
        {"full_attention": window, "linear_attention": None},
        {"full_attention": prefix, "linear_attention": None},
        {"full_attention": padded, "linear_attention": padding},
        {"full_attention": None, "linear_attention": padding},
    )
    for masks in cases:
        expected = theirs(tokens, attention_mask=dict(masks), use_cache=False).logits
        given = dict(masks)
        found = ours(tokens, attention_mask=given, use_cache=False).logits
        assert torch.equal(found, expected) and given == masks


def test_masks_in_a_dict_that_contradict_are_refused(patched):
    model = patched()
    mask = block_mask(IDS)
    other = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3]])
    for linear in (other, block_mask(other.tolist())):
        with pytest.raises(
            ValueError, match="put the boundaries of documents in different"
        ):
            masks = {"full_attention": mask, "linear_attention": linear}
            model(TOKENS, attention_mask=masks, use_cache=False)
    with pytest.raises(
        ValueError, match=r"4-D .*\(1, 1, 4, 4\) does not fit 1 rows of 9"
    ):
        masks = {"full_attention": mask[..., :4, :4], "linear_attention": None}
        model(TOKENS, attention_mask=masks, use_cache=False)
    # each token sees all of its document
    whole_documents = mask | mask.transpose(-1, -2)
    with pytest.raises(ValueError, match="is not block-causal"):
        model(
            TOKENS, attention_mask={"full_attention": whole_documents}, use_cache=False
        )


def test_a_block_mask_of_torch_names_the_documents(patched):
    from torch.nn.attention.flex_attention import create_block_mask

    ids = torch.tensor([[1] * 5 + [2] * 2 + [3] * 2])

    def sees(row, head, token, other):
        return (ids[row, token] == ids[row, other]) & (token >= other)

    blocks = create_block_mask(sees, 1, None, 9, 9, device="cpu")
    model = patched()
    expected = model(TOKENS, _packed_seq_ids=ids, use_cache=False).logits
    for mask in (blocks, {"full_attention": blocks}):
        assert torch.equal(
            model(TOKENS, attention_mask=mask, use_cache=False).logits, expected
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_mask_is_no_mask(model, kind):
    mask = KINDS[kind](block_mask([[1] * 9]))
    expected = model(TOKENS, use_cache=False).logits
    assert_close(
        "whole",
        model(TOKENS, attention_mask=mask, use_cache=False).logits,
        expected,
        1e-5,
    )
    name = cache_name(model)
    cache = model(TOKENS[:, :8], attention_mask=mask[..., :8, :8], use_cache=True)[name]
    # transformers' own forward reads it
    last = as_added(block_mask([[1] * 9]))[..., 8:, :]
    step = model(TOKENS[:, 8:], attention_mask=last, **{name: cache}).logits
    assert_close("a step on a cache", step, expected[:, 8:], 1e-5)
    layer = model.model.layers[0].linear_attn
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    assert torch.equal(layer(x, attention_mask=mask), layer(x))


@pytest.mark.parametrize("family", [DENSE, VISION])
def test_three_tables_of_positions_that_start_again_keep_documents_apart(fresh, family):
    model = fresh(family).double()
    patch(model, unpacked="fused")
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1]]).expand(3, 1, -1)
    logits = model(TOKENS, position_ids=positions, use_cache=False).logits
    alone = [
        model(TOKENS[:, start:end], use_cache=False).logits for start, end in SPANS
    ]
    assert_close("logits", logits, torch.cat(alone, 1), 1e-5)


PADDED = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])


def told(mask=PADDED) -> dict:
    indices, offsets, _ = unpad_data(mask)
    return {"cu_seqlens": offsets.long(), "indices": indices}


@pytest.mark.parametrize("unpacked", ["transformers", "fused"])
@pytest.mark.parametrize("family", [DENSE, NEXT])
def test_offsets_and_indices_are_the_mask_that_they_were_made_of(
    patched, family, unpacked
):
    model = patched(family, unpacked=unpacked)
    layer = model.model.layers[0].linear_attn
    torch.manual_seed(3)
    x = torch.randn(2, 6, 24)
    x[PADDED == 0] = float("nan")
    x.requires_grad_()
    expected = layer(x, attention_mask=PADDED)
    for more in (
        {},
        {"attention_mask": PADDED},
        {"attention_mask": PADDED > 0, "seq_index": None},
    ):
        y = layer(hidden_states=x, position_ids=torch.arange(6)[None], **told(), **more)
        assert torch.equal(y, expected)
        assert torch.equal(y[PADDED == 0], torch.zeros(3, 24))
    (gradient,), (wanted,) = (
        torch.autograd.grad(each.square().sum(), x) for each in (y, expected)
    )
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_padding_of_a_row_that_is_one_document_has_the_output_zero(patched, family):
    """In the mixer's own forward, where the convolution reaches over the row's end and
    a gate of zeros may be 1/2."""
    layer = mixer_of(patched(family, unpacked="fused").double())
    x = torch.randn(2, 6, 24, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    y = layer(x, attention_mask=mask)
    assert (y[1, 4:] == 0).all()
    assert_close("tokens", y[1:, :4], layer(x[1:, :4]), 1e-5)
    (gradient,) = torch.autograd.grad(y[1, 4:].sum(), x)
    assert (gradient == 0).all()


def test_positions_count_in_each_document_and_are_zero_at_padding():
    ids = torch.tensor([[1, 1, 1, 0, 2, 2, 0], [0, 0, 1, 1, 2, 0, 0]])
    options = SimpleNamespace(cp_mesh=None, cp_layout="zigzag_buffer")
    sources = BoundarySources(packed_seq_ids=ids)
    batch = resolve_batch(options, sources, torch.zeros(2, 7, 4), None)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("unpacked", ["transformers", "fused"])
def test_what_older_callers_pass_is_taken_by_keyword_alone(patched, unpacked):
    """Third by position is a mask for some transformers and cache_position for
    others."""
    model = patched(unpacked=unpacked)
    layer = model.model.layers[0].linear_attn
    x = torch.randn(2, 6, 24)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    y = layer(
        x, None, cache_position=torch.arange(6), attention_mask=mask, qkv_format="bshd"
    )
    assert torch.equal(y, layer(x, attention_mask=mask))
    for third in (torch.arange(6), mask):
        with pytest.raises(TypeError, match="positional arguments"):
            layer(x, None, third)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(6,\)"):
        layer(x, attention_mask=torch.ones(6))


@pytest.mark.parametrize("scaling", [None, 0.5, 3.0])
def test_gathered_attention_scales_scores_as_the_model_does(scaling):
    """None: by 1 / sqrt(D)."""
    q, k, v = torch.randn(3, 1, 2, 5, 16, dtype=torch.float64)
    document = LocalDocument(0, 5, 0, 5, None)
    share = SimpleNamespace(gather=lambda x: x, local_documents=[document])
    found, _ = gathered_attention(
        torch.nn.Module(), q, k, v, None, scaling=scaling, gdn_batch=ModelBatch(share)
    )
    scores = q @ k.mT * (scaling or 0.25)
    seen = torch.ones(5, 5).tril() > 0
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(found.transpose(1, 2), weights @ v)


def test_softmax_attention_that_would_mix_documents_is_refused():
    """Over ranks, the functions of transformers; in any other model, ours."""
    x = torch.randn(1, 2, 5, 16)
    for mask, batch in ((None, None), (torch.ones(1, 5), ModelBatch(None))):
        with pytest.raises(ValueError, match="and takes no attention_mask"):
            gathered_attention(torch.nn.Module(), x, x, x, mask, gdn_batch=batch)
    text = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    batch = ModelBatch(SimpleNamespace(group=object(), documents=object()))
    with pytest.raises(ValueError, match="'sdpa', which does not take them"):
        _mask_of_documents(text, batch, x, x)
    text.config._attn_implementation = GATHERED_ATTENTION
    assert _mask_of_documents(text, batch, x, x) is None
