"""What is changed in a patched model, or would be ignored or cut wrongly, counts or is
refused."""

import copy
import io
import pickle
from functools import partial, wraps

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from megatron_gdn import SequenceLayout
from megatron_gdn.compat.tested import TESTED_VERSIONS, VersionRange, warn_of_untested
from megatron_gdn.hf import PackingCollator, SSMGate, context_parallel_share, patch
from megatron_gdn.hf.drop_in import patching
from megatron_gdn.hf.drop_in.batch import ModelBatch
from megatron_gdn.mixers.packing import MicroBatchShare
from tests.hf.drop_in.conftest import (
    DENSE,
    FAMILIES,
    GLM,
    KIMI,
    NEXT,
    QWEN4,
    VISION,
    mixer_of,
)
from tests.hf.drop_in.test_collator import Mesh
from tests.hf.drop_in.test_sources import read
from tests.hf.tiny_models import build, cache_name
from tests.parallel import assert_close

LENGTHS = (5, 7, 3)
OFFSETS = torch.tensor((0, *LENGTHS)).cumsum(0)
IDS = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
SOURCES = {
    "offsets": {"cu_seq_lens_q": OFFSETS},
    "ids": {"_packed_seq_ids": IDS},
    "mask": {"attention_mask": IDS},
    "positions": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]},
    "nothing": {},
}
TOKENS = torch.arange(sum(LENGTHS))[None]


@pytest.mark.each_value
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", [NEXT, DENSE])
@torch.no_grad()
def test_a_forward_called_without_its_module_knows_the_documents(fresh, family, source):
    text = fresh(family).model
    patch(text)
    expected = text(TOKENS, **SOURCES[source], use_cache=False)
    found = text.forward(TOKENS, **SOURCES[source], use_cache=False)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize("family", [*FAMILIES, VISION])
@torch.no_grad()
def test_a_copy_of_a_patched_model_runs_its_own_parameters(patched, family):
    model = patched(family)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.zero_()
    assert model(TOKENS, use_cache=False).logits.any()
    assert not other(TOKENS, **SOURCES["offsets"], use_cache=False).logits.any()


@pytest.mark.parametrize("family", [DENSE, KIMI])
@pytest.mark.parametrize(
    ("write", "read_back"),
    [(torch.save, partial(torch.load, weights_only=False)), (pickle.dump, pickle.load)],
)
@torch.no_grad()
def test_a_patched_model_is_pickled_only_after_undo(fresh, family, write, read_back):
    """Its classes are made by the patch, so another process could not find them."""
    model = fresh(family)
    patched = patch(model)
    with pytest.raises(
        NotImplementedError, match=r"is patched.*model\.state_dict\(\).*undo"
    ):
        write(model, io.BytesIO())
    patched.undo()
    expected = model(TOKENS, use_cache=False).logits
    file = io.BytesIO()
    write(model, file)
    file.seek(0)
    assert torch.equal(read_back(file)(TOKENS, use_cache=False).logits, expected)


@torch.no_grad()
def test_a_shallow_copy_of_a_layer_has_its_class_and_its_modules(patched):
    layer = mixer_of(patched(DENSE))
    other = copy.copy(layer)
    assert type(other) is type(layer)
    assert other.out_proj is layer.out_proj
    other.drop_in = None
    assert layer.drop_in is not None


def test_a_forward_that_was_on_the_model_runs_inside_and_is_back_after_undo(fresh):
    text = fresh(DENSE).model
    calls = []
    own = text.forward
    text.forward = lambda *args, **kwargs: calls.append(kwargs) or own(*args, **kwargs)
    theirs = text.forward
    with patch(text):
        text(TOKENS, **SOURCES["ids"], use_cache=False)
        assert "gdn_batch" in calls[0]
    assert text.forward is theirs
    with patch(text):
        pass
    del text.forward
    with patch(text):
        text.forward(TOKENS, use_cache=False)
    assert "forward" not in vars(text)


@pytest.mark.parametrize("group", [None, "ranks"])
@pytest.mark.parametrize("attention", ["gathered", None])
@torch.no_grad()
def test_no_forward_changes_an_attention_that_the_user_set(
    fresh, monkeypatch, attention, group
):
    """After the patch, or before one that leaves attention to the user."""
    text = fresh(DENSE).model
    before = text.config._attn_implementation
    patch(text, attention=attention)
    monkeypatch.setattr(patching, "group_of", lambda mesh: group)
    monkeypatch.setattr(patching, "prepare_forward", lambda *given: given[-1])
    for chosen in {"eager", before} if attention is None else {"eager"}:
        text.config._attn_implementation = chosen
        text(TOKENS, use_cache=False)
        assert text.config._attn_implementation == chosen


def test_a_patch_whose_forward_was_wrapped_is_not_undone_around_it(fresh):
    text = fresh(DENSE).model
    patched = patch(text)
    ours = text.forward
    text.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(RuntimeError, match="was replaced since it was patched"):
        patched.undo()
    text(TOKENS, **SOURCES["ids"], use_cache=False)
    text.forward = ours
    patched.undo()


def test_a_patch_under_untested_versions_warns_once_in_one_line(fresh, monkeypatch):
    monkeypatch.setitem(TESTED_VERSIONS, "transformers", VersionRange("5.1", "5.2"))
    warn_of_untested.cache_clear()
    with pytest.warns(UserWarning, match="megatron_gdn was tested with") as warned:
        patch(fresh(DENSE))
        patch(fresh(NEXT))
    (said,) = (
        str(one.message) for one in warned if "was tested with" in str(one.message)
    )
    assert (
        "tested with transformers 5.1 to 5.2, this is 5." in said and "\n" not in said
    )
    warn_of_untested.cache_clear()


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.base_layer = module
        self.weight = module.weight
        self.bias = module.bias

    def forward(self, x):
        return 2 * self.base_layer(x)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("activation", lambda activation: "gelu", ValueError),
        ("conv1d", Wrapped, NotImplementedError),
    ],
)
def test_another_activation_or_convolution_is_refused(patched, name, change, error):
    model = patched()
    setattr(mixer_of(model), name, change(getattr(mixer_of(model), name)))
    with pytest.raises(error, match="activation='gelu'|conv1d is a Wrapped"):
        model(TOKENS, **SOURCES["offsets"], use_cache=False)


def forward_of_all_instances(norm, monkeypatch):
    forward = type(norm).forward
    doubled = lambda self, x, gate=None: 2 * forward(self, x, gate)  # noqa: E731
    monkeypatch.setattr(type(norm), "forward", doubled)


def wrapper_of_all_forwards(norm, monkeypatch):
    """Which names itself as the wrapped function does."""
    forward = type(norm).forward
    wrapper = wraps(forward)(lambda *args: 2 * forward(*args))
    monkeypatch.setattr(type(norm), "forward", wrapper)


def forward_of_the_instance(norm, monkeypatch):
    forward = norm.forward
    norm.forward = lambda *args: 2 * forward(*args)


def another_class(norm, monkeypatch):
    class DoubledRMSNormGated(type(norm)):
        def forward(self, *args):
            return 2 * super().forward(*args)

    norm.__class__ = DoubledRMSNormGated


def another_activation(norm, monkeypatch):
    """Which returns twice what it did."""
    silu = ACT2FN[norm.activation]
    monkeypatch.setitem(ACT2FN, "doubled", lambda: lambda x: 2 * silu(x))
    norm.activation = "doubled"


def hook_of_the_module(norm, monkeypatch):
    norm.register_forward_hook(lambda module, args, y: 2 * y)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "change",
    [
        forward_of_all_instances,
        wrapper_of_all_forwards,
        forward_of_the_instance,
        another_class,
        another_activation,
        hook_of_the_module,
    ],
)
@pytest.mark.parametrize("family", [NEXT, DENSE])
@torch.no_grad()
def test_a_norm_that_was_changed_is_called(patched, family, change, monkeypatch):
    model = patched(family)
    layer = mixer_of(model)
    x = torch.randn(1, sum(LENGTHS), 24)
    expected = 2 * layer(x, cu_seqlens=OFFSETS)
    change(layer.norm, monkeypatch)
    assert_close("output", layer(x, cu_seqlens=OFFSETS), expected, 1e-6)


def test_a_mask_of_ones_and_zeros_counts_beside_offsets_and_ids():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    ids = torch.tensor([[4, 4, 4, 5, 5, 5, 5, 5]])
    offsets = torch.tensor([0, 3, 8])
    assert read(attention_mask=mask, cu_seqlens=offsets) == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert read(attention_mask=mask.bool(), packed_seq_ids=ids) == [
        [4, 4, 4, 5, 5, 5, 0, 0]
    ]
    one = read(attention_mask=mask, cu_seqlens=torch.tensor([0, 8]))
    assert one == [[1, 1, 1, 1, 1, 1, 0, 0]]


def test_seq_index_on_one_rank_is_read(patched):
    model = patched()
    tokens = torch.randint(67, (1, 4))
    straight = model(tokens, seq_index=torch.arange(4)).logits
    assert torch.equal(straight, model(tokens).logits)
    with pytest.raises(ValueError, match="is no share of 4 tokens"):
        model(tokens, seq_index=torch.tensor([0, 2, 1, 3]))


def test_documents_cannot_follow_what_a_cache_holds(patched):
    model = patched()
    tokens = torch.randint(67, (1, 4))
    name = cache_name(model)
    cache = model(tokens, use_cache=True)[name]
    layer = mixer_of(model)
    x = torch.randn(1, 4, 24)
    for more in (
        {"_packed_seq_ids": torch.tensor([[1, 1, 2, 2]])},
        {"cu_seq_lens_q": torch.tensor([0, 2, 4])},
        {"cu_seqlens": torch.tensor([0, 2, 4])},
        {"seq_index": torch.arange(4)},
    ):
        with pytest.raises(ValueError, match="goes on from a cache"):
            model(tokens, **{name: cache}, **more)
        with pytest.raises(ValueError, match="goes on from a cache"):
            model(tokens, cache=cache, **more)
        with pytest.raises(ValueError, match="goes on from a cache"):
            layer(x, cache, **more)


@torch.no_grad()
def test_a_cache_counts_under_each_name_that_transformers_has_for_it(patched):
    """``cache_params`` before transformers 5.24, ``cache`` since then."""
    model = patched(unpacked="fused")
    tokens = torch.randint(67, (1, 5))
    layer = mixer_of(model)
    x = torch.randn(1, 1, 24)
    name = cache_name(model)

    def filled():
        return model(tokens, use_cache=True)[name]

    expected = layer(x, filled())
    assert not torch.equal(expected, layer(x))
    for keyword in ("cache", "cache_params"):
        assert torch.equal(layer(x, **{keyword: filled()}), expected)
    with pytest.raises(ValueError, match="cache and cache_params are different caches"):
        layer(x, cache=filled(), cache_params=filled())
    if name == "past_key_values":
        with pytest.raises(ValueError, match="cache= is the name of transformers 5.24"):
            model(tokens, cache=filled())


def test_documents_that_per_layer_embeddings_would_mix_are_refused():
    """Their n-grams end at the end-of-text token, and their convolution nowhere."""
    n_grams = {"ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 50}
    model = build(
        QWEN4, **n_grams, make_ngram_vocab_size_divisible_by=2, eos_token_id=3
    )
    tokens = torch.randint(67, (1, 8))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    alone = model(tokens).logits
    patch(model)
    assert torch.equal(model(tokens).logits, alone)
    with pytest.raises(
        NotImplementedError, match=r"packed documents .*ple_layer_ids=\[1\]"
    ):
        model(tokens, position_ids=positions)


def test_documents_that_indexed_attention_would_mix_are_refused(fresh):
    model = fresh(GLM)
    tokens = torch.randint(67, (1, 8))
    alone = model(tokens).logits
    patch(model)
    assert torch.equal(model(tokens).logits, alone)
    with pytest.raises(NotImplementedError, match="takes a mask of padding only"):
        model(tokens, attention_mask=torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]]))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_patch_that_fails_halfway_leaves_the_model_as_it_was(
    fresh, monkeypatch, error
):
    """By an error, or by the user."""
    model = fresh(DENSE)
    before = fresh(DENSE)
    model.model.layers[2].linear_attn.activation = "gelu"
    if error is KeyboardInterrupt:
        change = patching.become_drop_in

        def change_all_but_the_last(module, *given):
            if module.activation == "gelu":
                raise error
            return change(module, *given)

        monkeypatch.setattr(patching, "become_drop_in", change_all_but_the_last)
        with pytest.raises(error):
            patch(model)
    else:
        with pytest.raises(error, match="activation='gelu'.* Set hidden_act='silu'"):
            patch(model)
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert len(ours._forward_pre_hooks) == len(theirs._forward_pre_hooks)


def pieces_of_rank(tokens: torch.Tensor, size: int, rank: int) -> list[int]:
    """Two of ``2 * size`` pieces, in the order of the tokens."""
    pieces = tokens.chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]).tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_a_share_in_zigzag_has_two_pieces_of_every_document(size):
    lengths = [4 * size, 2 * size, 6 * size]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(sum(lengths))
    batch = {"input_ids": tokens[None], "cu_seq_lens_q": offsets}
    for rank in range(size):
        by_document = [
            pieces_of_rank(document, size, rank) for document in tokens.split(lengths)
        ]
        found = context_parallel_share(batch, Mesh(size, rank), "zigzag")
        assert found["input_ids"].tolist() == [sum(by_document, [])]
        assert torch.equal(found["cu_seq_lens_q"], offsets)
        found = context_parallel_share(batch, Mesh(size, rank), "zigzag_buffer")
        assert found["input_ids"].tolist() == [pieces_of_rank(tokens, size, rank)]


@pytest.mark.parametrize("size", [2, 3])
def test_positions_of_a_share_that_is_not_packed_are_those_of_its_tokens(size):
    tokens = torch.arange(4 * size)
    layout = SequenceLayout.ZIGZAG_BUFFER
    for rank in range(size):
        share = MicroBatchShare(
            None, object(), size, rank, layout, (len(tokens),), tokens.device
        )
        expected = [pieces_of_rank(tokens, size, rank)]
        assert ModelBatch(share).positions.tolist() == expected


def test_a_share_of_tokens_with_several_codes_is_cut_too():
    codes = torch.arange(24).view(1, 8, 3)
    share = context_parallel_share({"input_ids": codes}, Mesh(2, 1), "contiguous")
    assert torch.equal(share["input_ids"], codes[:, 4:])


def test_a_share_cuts_or_refuses_whatever_has_the_tokens():
    batch = PackingCollator(pad_to_multiple_of=4)([{"input_ids": [5, 6, 7, 8, 9]}])
    pixels = torch.ones(2, 3)
    more = {
        "position_ids": torch.arange(8).expand(4, 1, 8),
        "inputs_embeds": torch.arange(8.0)[None, :, None].expand(1, 8, 3),
        "pixel_values": pixels,  # without tokens
    }
    share = context_parallel_share(batch | more, Mesh(2, 1), "contiguous")
    assert share["position_ids"].tolist() == [[[4, 5, 6, 7]]] * 4
    assert share["inputs_embeds"][0, :, 0].tolist() == [4, 5, 6, 7]
    assert share["pixel_values"] is pixels
    for name, x in (
        ("weights", torch.ones(8)),
        ("attention_mask", torch.ones(1, 1, 8, 8)),
    ):
        with pytest.raises(ValueError, match=f"{name} of shape"):
            context_parallel_share(batch | {name: x}, Mesh(2, 1), "contiguous")
    with pytest.raises(ValueError, match="no input_ids"):
        context_parallel_share({"labels": batch["labels"]}, Mesh(2, 1))
    with pytest.raises(ValueError, match="multiple of 4"):
        context_parallel_share(
            PackingCollator()([{"input_ids": [5, 6, 7]}]), Mesh(2, 0)
        )


@pytest.mark.parametrize(
    "options", [{"rule_operands": "bf16"}, {"recompute_qkv": True}], ids=str
)
def test_options_that_kimi_delta_attention_does_not_have_are_refused(fresh, options):
    with pytest.raises(ValueError, match="has neither option"):
        patch(fresh(KIMI), **options)


def test_the_holder_of_kimis_gates_computes_no_other_gate(patched):
    model = patched(KIMI)
    layer = next(m for m in model.modules() if hasattr(m, "drop_in"))
    holder = next(m for m in layer.modules() if isinstance(m, SSMGate))
    with pytest.raises(ValueError, match="the gate of a Kimi Delta Attention"):
        holder(torch.randn(1, 1, 8))


def test_an_undone_patch_leaves_no_hook(fresh):
    model = fresh(DENSE)

    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    before = hooks()
    patched = patch(model)
    assert hooks() > before
    patched.undo()
    assert hooks() == before
