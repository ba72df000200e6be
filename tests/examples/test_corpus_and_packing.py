"""Laws of the pretraining data: nothing lost, nothing twice, nothing out of order."""

import sysconfig
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretraining.corpus import (
    END_OF_DOCUMENT,
    Corpus,
    read_paths,
    standard_library,
    token_stream,
)
from pretraining.feed import Feed
from pretraining.packing import (
    dense_micro_batch,
    packed_micro_batch,
    pieces_of,
    plan_packs,
    visiting_order,
)

corpora = st.lists(st.binary(max_size=70), min_size=1, max_size=9).map(
    lambda documents: Corpus(tuple(documents))
)
multiples = st.sampled_from([1, 4, 8])


def packed_epoch(stream, blocks, rows, multiple):
    capacity = blocks * multiple * rows
    packs = plan_packs(list(pieces_of(stream, blocks * multiple, multiple)), capacity)
    return packs, [packed_micro_batch(stream, pack, capacity) for pack in packs]


def counted(batches, name):
    """What the loss sees of one field, in the order it is fed."""
    return torch.cat(
        [getattr(batch, name)[batch.loss_mask.bool()] for batch in batches]
    )


def documents_in(labels):
    """Split labels into documents; each ends with its end-of-document label."""
    documents = []
    current = bytearray()
    for token in labels.tolist():
        if token == END_OF_DOCUMENT:
            documents.append(bytes(current))
            current = bytearray()
        else:
            current.append(token)
    assert not current
    return documents


@given(corpora, st.integers(1, 5), st.integers(1, 4), multiples)
def test_packing_feeds_every_byte_of_every_document_once_and_in_order(
    c, blocks, rows, multiple
):
    stream = token_stream(c)
    _, batches = packed_epoch(stream, blocks, rows, multiple)
    assert documents_in(counted(batches, "labels")) == list(c.documents)
    assert torch.equal(counted(batches, "tokens"), stream.tokens[:-1].long())


@given(corpora, st.integers(1, 40), st.integers(1, 3))
def test_dense_rows_feed_every_byte_of_every_document_once_and_in_order(
    corpus, seq_length, rows
):
    stream = token_stream(corpus)
    starts = range(0, stream.num_labels, seq_length)
    batches = [
        dense_micro_batch(stream, starts[i : i + rows], seq_length, rows)
        for i in range(0, len(starts), rows)
    ]
    assert documents_in(counted(batches, "labels")) == list(corpus.documents)
    assert torch.equal(counted(batches, "tokens"), stream.tokens[:-1].long())


@given(st.integers(0, 200), st.integers(0, 5), st.integers(0, 3))
def test_every_epoch_visits_everything_once_in_an_order_of_its_own(count, seed, epoch):
    order = visiting_order(count, seed, epoch)
    assert sorted(order) == list(range(count))
    assert order == visiting_order(count, seed, epoch)
    # Two of 20! or more orders are equal by chance never.
    assert count < 20 or order != visiting_order(count, seed, epoch + 1)


@given(corpora, st.integers(1, 5), st.integers(1, 4), multiples)
def test_packed_lengths_describe_the_buffer(corpus, blocks, rows, multiple):
    stream = token_stream(corpus)
    packs, batches = packed_epoch(stream, blocks, rows, multiple)
    for pack, batch in zip(packs, batches, strict=True):
        assert (
            sum(batch.padded_lengths)
            == batch.tokens.numel()
            == blocks * multiple * rows
        )
        assert all(padded % multiple == 0 for padded in batch.padded_lengths)
        assert batch.lengths == tuple(piece.length for piece in pack)
        offset = 0
        for length, padded in zip(batch.lengths, batch.padded_lengths, strict=True):
            assert length <= padded
            assert batch.loss_mask[0, offset : offset + length].all()
            assert not batch.loss_mask[0, offset + length : offset + padded].any()
            assert batch.position_ids[0, offset : offset + length].tolist() == list(
                range(length)
            )
            offset += padded


def make_feed(corpus, *, cp=(1, 0), dp=(1, 0), packing=True, shuffle=True, consumed=0):
    cp_size, cp_rank = cp
    dp_size, dp_rank = dp
    place = {
        "cp_size": cp_size,
        "cp_rank": cp_rank,
        "dp_size": dp_size,
        "dp_rank": dp_rank,
    }
    shape = {"seq_length": 16, "micro_batch_size": 3, "packing": packing, "multiple": 4}
    order = {"seed": 5, "shuffle": shuffle, "consumed": consumed}
    return Feed(corpus, device=torch.device("cpu"), **place, **shape, **order)


CORPUS = Corpus(tuple(bytes([n]) * (n * 7 % 53) for n in range(40)))


def same(a, b):
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "dense"])
def test_a_feed_continues_from_its_position_across_epochs(packing):
    feed = make_feed(CORPUS, packing=packing)
    first = list(islice(feed, 70))
    assert feed.epoch >= 2
    for position in (0, 1, 33, 69):
        assert same(
            next(make_feed(CORPUS, packing=packing, consumed=position)), first[position]
        )


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "as it stands"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "dense"])
def test_an_epoch_of_the_feed_is_the_corpus(packing, shuffle):
    feed = make_feed(CORPUS, packing=packing, shuffle=shuffle)
    batches = [next(feed)]
    while feed.epoch == 0:
        batches.append(next(feed))
    batches.pop()  # the first of the next epoch
    labels = counted(batches, "labels")
    everything = token_stream(CORPUS).tokens[1:].long()
    assert torch.equal(labels.sort().values, everything.sort().values)
    assert torch.equal(labels, everything) is not shuffle


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "dense"])
def test_data_parallel_ranks_take_turns(packing):
    alone = list(islice(make_feed(CORPUS, packing=packing), 12))
    feeds = [make_feed(CORPUS, packing=packing, dp=(3, rank)) for rank in range(3)]
    together = [next(feeds[index % 3]) for index in range(12)]
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    assert {feed.consumed for feed in feeds} == {12}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "dense"])
def test_context_parallel_ranks_share_every_token_of_a_micro_batch(packing):
    whole = next(make_feed(CORPUS, packing=packing))
    parts = [
        next(make_feed(CORPUS, packing=packing, cp=(2, rank))) for rank in range(2)
    ]
    assert all(part.tokens.shape[1] * 2 == whole.tokens.shape[1] for part in parts)
    seen = torch.cat([part.labels + 1000 * part.position_ids for part in parts], dim=1)
    expected = whole.labels + 1000 * whole.position_ids
    assert torch.equal(seen.sort().values, expected.sort().values)
    assert sum(part.loss_mask.sum() for part in parts) == whole.loss_mask.sum()


def test_packed_parameters_carry_real_and_padded_boundaries():
    batch = next(make_feed(CORPUS, cp=(2, 1)))
    packed = batch.packed_seq_params
    assert packed.qkv_format == "thd"
    real = packed.cu_seqlens_q.tolist()
    padded = packed.cu_seqlens_q_padded.tolist()
    assert padded[-1] == 2 * batch.tokens.shape[1] == 48
    assert packed.max_seqlen_q == max(b - a for a, b in pairwise(padded))
    for (a, b), (c, d) in zip(pairwise(real), pairwise(padded), strict=True):
        assert 0 < b - a <= d - c and (d - c) % 4 == 0


def test_the_position_means_nothing_on_other_data():
    changed = Corpus((*CORPUS.documents[:-1], b"something else"))
    assert make_feed(CORPUS).identity() != make_feed(changed).identity()
    moved_boundary = Corpus((b"ab", b"c")), Corpus((b"a", b"bc"))
    assert moved_boundary[0].fingerprint() != moved_boundary[1].fingerprint()


def test_folders_give_their_text_files_in_sorted_order_and_name_the_others(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_bytes("gr\u00fcn".encode())
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "inner" / "c.md").write_bytes(b"deep")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\xff")
    corpus = read_paths([str(tmp_path)])
    assert corpus.documents == (b"", "gr\u00fcn".encode(), b"deep")
    assert corpus.skipped == (str(tmp_path / "image.png"),)
    assert read_paths([str(tmp_path / "image.png")]).documents == (b"\x89PNG\0\xff",)


def test_missing_and_empty_data_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.txt: no such file"):
        read_paths([str(tmp_path / "nowhere.txt")])
    with pytest.raises(ValueError, match="no text in there"):
        read_paths([str(tmp_path)])
    (tmp_path / "empty.txt").touch()
    for path in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(
            ValueError, match="no text in there .1 files are empty, 0 are not UTF"
        ):
            read_paths([str(path)])


def test_the_default_corpus_is_the_standard_library_without_tests():
    corpus = standard_library()
    # Any CPython ships several hundred modules.
    assert len(corpus.documents) > 300 and corpus.num_bytes > 5_000_000
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "argparse.py").read_bytes() in corpus.documents
    tests = [p for p in root.glob("*/idle_test/*.py") if p.stat().st_size > 1000]
    if not tests:
        pytest.skip("this Python comes without idlelib's tests, nothing to leave out")
    assert not {p.read_bytes() for p in tests} & set(corpus.documents)
