"""Packed documents are those documents alone: padding, rows, gradients, whole
models."""

import pytest
import torch

from megatron_gdn import unpad_data
from megatron_gdn.hf import PackingLeak, assert_no_packing_leak, packing_reach, patch
from tests.hf.drop_in.conftest import (
    DENSE,
    FAMILIES,
    NEXT,
    VISION,
    VISION_MOE,
    in_float64,
    mixer_of,
    results,
)
from tests.hf.drop_in.test_sources import block_mask
from tests.hf.tiny_models import cache_name
from tests.parallel import assert_close
from tests.whole_groups import whole_groups

# A mask in which a row ends in document 1 and the next begins with one, with padding
# everywhere.
MASK = [[1, 1, 1, 0, 0, 0, 0], [1, 1, 2, 2, 2, 0, 3]]
# Each term of in_proj's products, of a chunk's and of out_proj's is rounded once at
# most.
ROUNDED = (24 + 64 + 32) * 2.0**-24
SPANS = [(0, 0, 3), (1, 0, 2), (1, 2, 5), (1, 6, 7)]


@pytest.fixture
def layer(fresh, request):
    model = fresh(getattr(request, "param", DENSE))
    patch(model, unpacked="fused")
    return mixer_of(model)


class RowByRow(torch.nn.Linear):
    """A linear whose rows do not meet in one product, whose order of sums the library
    picks."""

    def forward(self, x):
        return (x[..., None, :] * self.weight).sum(-1)


@pytest.mark.each_value
@whole_groups()
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", [DENSE, pytest.param(NEXT, marks=pytest.mark.slow)])
def test_a_packed_document_has_the_bits_of_the_document_alone(
    patched, family, recompute
):
    """Of all but the linears, which are left to a library that picks kernels by
    shape."""
    model = patched(family, unpacked="fused", recompute_qkv=recompute)
    layer = mixer_of(model)
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = RowByRow
    torch.manual_seed(6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for lengths in ((1, 64, 1, 67), (64, 128, 70, 13), (3, 129, 31, 2)):
            x = torch.randn(1, sum(lengths), 24, requires_grad=True)
            weight = torch.randn(1, sum(lengths), 24)
            offsets = torch.tensor((0, *lengths)).cumsum(0)
            y = layer(x, cu_seqlens=offsets)
            y.backward(weight)
            for start, end in zip(offsets, offsets[1:], strict=False):
                alone = x.detach()[:, start:end].requires_grad_()
                out = layer(alone)
                out.backward(weight[:, start:end])
                assert torch.equal(y[:, start:end], out), (lengths, start)
                assert torch.equal(x.grad[:, start:end], alone.grad), (lengths, start)
    finally:
        torch.set_num_threads(threads)


def test_rows_never_reach_the_next_row_and_padding_is_zero(layer):
    torch.manual_seed(7)
    mask = torch.tensor(MASK)
    padding = mask == 0
    x = torch.randn(2, 7, 24)
    x[padding] = float("nan")
    x.requires_grad_()
    y = layer(x, attention_mask=mask)
    assert not y[padding].any()
    for row, start, end in SPANS:
        assert_close(
            "alone", y[row, start:end], layer(x[row : row + 1, start:end])[0], ROUNDED
        )
        others = torch.where(
            mask[..., None] == mask[row, start], x, torch.randn_like(x)
        )
        others[1 - row] = torch.randn(7, 24)
        others[row, start:end] = x[row, start:end]
        again = layer(others, attention_mask=mask)
        assert torch.equal(again[row, start:end], y[row, start:end])
    y.square().sum().backward()
    assert not x.grad[padding].any()
    alone = x.detach()[1:, 2:5].requires_grad_()
    layer(alone).square().sum().backward()
    assert_close("gradient", x.grad[1:, 2:5], alone.grad, ROUNDED)


def test_a_row_of_nothing_but_padding_is_zero(layer):
    y = layer(
        torch.randn(2, 3, 24), attention_mask=torch.tensor([[0, 0, 0], [1, 2, 2]])
    )
    assert torch.equal(y[0], torch.zeros(3, 24))
    y = layer(torch.randn(1, 3, 24), _packed_seq_ids=torch.zeros(1, 3))
    assert torch.equal(y, torch.zeros(1, 3, 24))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "source", ["indexed_mask", "packed_seq_ids", "position_ids", "4-D"]
)
@pytest.mark.parametrize("family", [*FAMILIES, VISION, VISION_MOE])
def test_a_packed_model_has_the_logits_of_each_document_alone(fresh, family, source):
    """float64, but for transformers' norms and rotations."""
    model = in_float64(fresh(family))
    patch(model, unpacked="fused")
    torch.manual_seed(8)
    ids = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 3, 3]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1]])
    tokens = torch.randint(67, (1, 9))
    told = {
        "indexed_mask": {"attention_mask": ids},
        "packed_seq_ids": {"_packed_seq_ids": ids},
        "position_ids": {"position_ids": positions},
        "4-D": {"attention_mask": block_mask(ids.tolist()), "position_ids": positions},
    }[source]
    logits = model(tokens, **told).logits
    for start, end in ((0, 5), (5, 7), (7, 9)):
        alone = model(tokens[:, start:end], use_cache=False).logits
        assert_close("alone", logits[:, start:end], alone, 1e-5)


@pytest.mark.parametrize("family", [VISION, VISION_MOE])
def test_an_image_goes_through_a_patched_model_alone_and_packed(fresh, family):
    """fp32; the image is four tokens of the first document."""
    theirs = fresh(family)
    ours = fresh(family)
    patch(ours, unpacked="fused")
    tokens = torch.randint(50, (1, 11), generator=torch.Generator().manual_seed(1))
    tokens[:, 2:6] = 60
    seen = {
        "pixel_values": torch.randn(16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    for model in (theirs, ours):
        model.config.image_token_id = 60

    def logits(model, end=11, **told):
        kinds = (tokens[:, :end] == 60).int()
        more = {"mm_token_type_ids": kinds, "use_cache": False, **seen, **told}
        return model(tokens[:, :end], **more).logits

    assert_close("unpacked", logits(ours), logits(theirs), 1e-5)
    packed = logits(ours, _packed_seq_ids=torch.tensor([[1] * 7 + [2] * 4]))
    assert_close("first", packed[:, :7], logits(ours, 7), 1e-5)
    assert_close(
        "second", packed[:, 7:], ours(tokens[:, 7:], use_cache=False).logits, 1e-5
    )


def test_padded_rows_of_documents_go_through_a_model(fresh):
    model = fresh(DENSE).double()
    patch(model, unpacked="fused")
    torch.manual_seed(9)
    tokens = torch.randint(67, (2, 7))
    mask = torch.tensor(MASK)
    indices, offsets, _ = unpad_data(mask)
    for told in (
        {"attention_mask": mask},
        {"cu_seqlens": offsets.long(), "indices": indices},
    ):
        logits = model(tokens, use_cache=False, **told).logits
        for row, start, end in SPANS:
            alone = model(tokens[row : row + 1, start:end], use_cache=False).logits[0]
            assert_close("alone", logits[row, start:end], alone, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_leak_of_unpatched_models_is_found_and_of_patched_ones_is_not_there(
    fresh, family
):
    model = fresh(family)
    with pytest.raises(
        PackingLeak, match=r"document 0 changes document 1 by \d"
    ) as caught:
        assert_no_packing_leak(model)
    assert caught.value.leaks == [(0, 1), (0, 2), (1, 2)]
    with pytest.raises(PackingLeak):
        assert_no_packing_leak(mixer_of(model))
    patch(model)
    sources = ("position_ids", "cu_seq_lens_q", "packed_seq_ids", "indexed_mask")
    for source in sources:
        assert packing_reach(model, source=source).leaks() == []
    # To the last bit where no experts are computed together.
    assert_no_packing_leak(mixer_of(model), (3, 1, 70), tolerance=0)
    if family == DENSE:
        assert_no_packing_leak(model, (3, 1, 70), tolerance=0)


def test_questions_that_make_no_sense_are_refused(fresh):
    for lengths in ((5,), (5, 0), (-1, 5, 5)):
        with pytest.raises(ValueError, match="two documents or more, of a token or"):
            packing_reach(fresh(DENSE), lengths)
    with pytest.raises(ValueError, match="source='mask' is not known"):
        packing_reach(fresh(DENSE), source="mask")
    with pytest.raises(ValueError, match="Linear has no hidden_size"):
        packing_reach(torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    "source", ["position_ids", "cu_seq_lens_q", "packed_seq_ids", "indexed_mask"]
)
def test_a_patched_layer_is_told_of_documents_by_each_source(patched, source):
    assert packing_reach(mixer_of(patched()), (3, 4), source=source).leaks() == []


def test_what_a_model_returns_as_a_tuple_is_measured(patched):
    model = patched()
    found = packing_reach(model, (3, 4), return_dict=False)
    expected = packing_reach(model, (3, 4))
    assert torch.equal(found.change, expected.change)


def test_a_model_without_input_says_what_transformers_says(fresh, patched):
    said = []
    for model in (fresh(DENSE), patched()):
        with pytest.raises(ValueError) as raised:
            model(use_cache=False)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_cache_and_packed_documents_do_not_go_together(patched):
    from transformers import DynamicCache

    model = patched()
    tokens = torch.randint(67, (1, 4))
    ids = torch.tensor([[1, 1, 2, 2]])
    name = cache_name(model)
    assert model(tokens, _packed_seq_ids=ids).get(name) is None
    for more in ({"use_cache": True}, {name: DynamicCache(config=model.config)}):
        with pytest.raises(
            ValueError, match="a cache cannot be filled with packed documents"
        ):
            model(tokens, _packed_seq_ids=ids, **more)


def test_flash_attention_is_given_what_it_can_honour_or_nothing(fresh):
    """Its kernels need a GPU; what they would be told is settled before."""
    from megatron_gdn.hf.drop_in.layer import DropInOptions
    from megatron_gdn.hf.drop_in.patching import prepare_forward

    text = fresh(DENSE).model
    patch(text)
    text.config._attn_implementation = "flash_attention_2"
    tokens = torch.randint(67, (1, 4))
    ids = torch.tensor([[1, 1, 2, 2]])
    given = prepare_forward(
        text, DropInOptions(), {"input_ids": tokens, "_packed_seq_ids": ids}
    )
    assert given["attention_mask"] == {"full_attention": None, "linear_attention": None}
    assert given["position_ids"].tolist() == [[0, 1, 0, 1]]
    for more in (
        {"position_ids": torch.arange(4)[None]},
        {"position_ids": torch.tensor([[[0, 1, 0, 1]]] * 3)},  # three axes
        {"_packed_seq_ids": ids * (ids < 2)},
        {"input_ids": tokens.expand(2, -1), "_packed_seq_ids": ids.expand(2, -1)},
    ):
        with pytest.raises(ValueError, match="only in one row without padding"):
            prepare_forward(
                text,
                DropInOptions(),
                {"input_ids": tokens, "_packed_seq_ids": ids, **more},
            )


def test_a_mask_that_only_the_callers_attention_reads_is_passed_on(fresh):
    """On one rank a mask that is no tensor."""
    from megatron_gdn.hf.drop_in.layer import DropInOptions
    from megatron_gdn.hf.drop_in.patching import prepare_forward

    text = fresh(DENSE).model
    patch(text)
    mask = object()
    told = {
        "input_ids": torch.randint(67, (1, 4)),
        "_packed_seq_ids": torch.tensor([[1, 1, 2, 2]]),
        "attention_mask": {"full_attention": mask},
    }
    given = prepare_forward(text, DropInOptions(), told)["attention_mask"]
    assert given == {"full_attention": mask, "linear_attention": None}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_tables_do_not_follow_the_default_device(fresh, implementation):
    model = fresh(DENSE)
    model.set_attn_implementation(implementation)
    patch(model, unpacked="fused")
    tokens = torch.randint(67, (2, 7))
    mask = torch.tensor(MASK)
    indices, offsets, _ = unpad_data(mask)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
    sources = (
        {},
        {"attention_mask": mask},
        {"attention_mask": block_mask(MASK)},
        {"position_ids": positions},
        {"cu_seq_lens_q": torch.tensor([0, 3, 7, 14])},
        {"cu_seqlens": offsets, "indices": indices},
        {"seq_index": torch.arange(7)},
    )

    weight = torch.ones(2, 7, 67)
    usual = results(model, tokens, sources, weight)
    with torch.device("meta"):  # stands for a GPU; what comes up there has no values
        elsewhere = results(model, tokens, sources, weight)
        for source in (
            "position_ids",
            "cu_seq_lens_q",
            "packed_seq_ids",
            "indexed_mask",
        ):
            assert_no_packing_leak(model, source=source)
        assert_no_packing_leak(mixer_of(model))
    assert all(torch.equal(a, b) for a, b in zip(usual, elsewhere, strict=True))


def test_what_was_found_is_logged(fresh, caplog):
    model = fresh(DENSE)
    with caplog.at_level("INFO", "megatron_gdn"):
        patched = patch(model, unpacked="fused")
        said = assert_no_packing_leak(model)
    assert repr(patched) in caplog.messages and said in caplog.messages
    assert "3 linear-attention modules" in repr(patched) and "every batch" in repr(
        patched
    )
    patched.undo()
    assert repr(patched) == f"Patch of {DENSE}: undone"


def test_the_report_of_leaks_does_not_depend_on_dropout():
    """A module in training is measured in evaluation, and is in training afterwards; it
    gets one row."""

    class WithDropout(torch.nn.Module):
        hidden_size = 8

        def __init__(self):
            super().__init__()
            self.linear, self.dropout = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)

        def forward(self, hidden_states, position_ids):
            assert hidden_states.shape[:2] == position_ids.shape == (1, 5 + 7 + 4)
            return self.dropout(self.linear(hidden_states))

    module = WithDropout().train()
    assert packing_reach(module).leaks() == []
    assert packing_reach(WithDropout().bfloat16()).leaks() == []
    assert module.training and module.dropout.training
    module.eval()
    packing_reach(module)
    assert not module.training
