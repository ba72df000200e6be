"""Boundaries of documents that no buffer has: our error, in a few words, and never
other rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn.mixers.packing import resolve_packed_seq_params
from megatron_gdn.ops.documents import Documents, shortened
from tests.searches import examples

CPU = torch.device("cpu")
TOKENS = 16


def tensor(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def resolve(**boundaries):
    params = PackedSeqParams(qkv_format="thd", **boundaries)
    return resolve_packed_seq_params(params, TOKENS, CPU)


GOOD = tensor(0, 8, 16)
BAD = {
    "0-d": tensor(16)[0],
    "2-d": GOOD[None],
    "meta": GOOD.to("meta"),
    "sparse": GOOD.to_sparse(),
    "float": GOOD.float(),
    "bool": GOOD.bool(),
    "complex": GOOD.to(torch.complex64),
    "empty": GOOD[:0],
    "one": GOOD[:1],
    "2^31": tensor(0, 2**31, dtype=torch.int64),
    "2^63": torch.tensor([0, 2**63], dtype=torch.uint64),
    "negative": tensor(0, -8, 16),
    "backwards": tensor(0, 12, 8, 16),
}
NAMES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beside", ["alone", "all"])
def test_bad_boundaries_are_refused_beside_good_ones_too(beside, name, bad):
    """Wherever they are, also where the layer would read other boundaries."""
    others = dict.fromkeys(NAMES, GOOD) if beside == "all" else {}
    with pytest.raises(ValueError) as error:
        resolve(**{**others, name: BAD[bad]})
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "unpadded",
    [(1, 9, 17), (5, 6, 7), (0, 9, 16), (0, 8), (0, 2, 4, 6), (0, 8, 6)],
    ids=str,
)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_lengths_that_contradict_the_slots_are_refused(name, unpadded):
    with pytest.raises(ValueError):
        resolve(
            **{name: tensor(*unpadded)},
            cu_seqlens_q_padded=GOOD,
            cu_seqlens_kv_padded=GOOD,
        )
    good = resolve(
        **{name: tensor(0, 3, 11)}, cu_seqlens_q_padded=GOOD, cu_seqlens_kv_padded=GOOD
    )
    assert good is not None and good.offsets == (0, 8, 16)


def test_boundaries_of_many_documents_are_told_in_few_words():
    many = torch.arange(200_001, dtype=torch.int32)
    other = many.clone()
    other[1] = 0
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=many, cu_seqlens_kv=other)
    with pytest.raises(ValueError, match="199989 more") as error:
        resolve_packed_seq_params(params, 200_000, CPU)
    assert len(str(error.value)) < 1000
    slots = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=2 * many,
        cu_seqlens_q_padded=many,
        cu_seqlens_kv=2 * many,
    )
    with pytest.raises(ValueError, match="one slot per document") as error:
        resolve_packed_seq_params(slots, 200_000, CPU)
    assert len(str(error.value)) < 1000
    assert shortened(range(20)) == str([*range(20)])


def test_a_buffer_of_2_to_the_31_tokens_is_refused():
    assert Documents((0, 2**31 - 1), CPU).total_tokens == 2**31 - 1
    with pytest.raises(ValueError, match="at most 2147483647 tokens"):
        Documents.from_cu_seqlens([0, 2**31], 2**31)


NUMBERS = st.one_of(
    st.integers(-2, TOKENS + 2), st.sampled_from([2**31, 2**63, -(2**63), 2**64])
)
INSIDE = st.lists(st.integers(-2, TOKENS + 2), max_size=4)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.lists(NUMBERS, max_size=6) | INSIDE.map(lambda x: [0, *x, TOKENS]))
def test_any_integers_are_documents_that_cover_the_buffer_or_are_refused(offsets):
    try:
        found = Documents.from_cu_seqlens(offsets, TOKENS)
    except ValueError:
        return
    assert list(found.offsets) == offsets and sum(found.lengths) == TOKENS
    assert min(found.lengths) >= 0
    # kernels see no document without tokens
    assert found.cu_seqlens.tolist() == sorted(set(offsets))
