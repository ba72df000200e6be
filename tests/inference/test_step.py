"""However a sequence is cut into prefills and decode steps, it gives what one forward
gives."""

import pytest
import torch

from megatron_gdn.inference import Memory, choose, decode, prefill
from megatron_gdn.ops.rules.chunk_table import CHUNK
from tests.inference.row_mixers import (
    KINDS,
    copied,
    documents_of,
    empty_memory,
    prefilled,
    run_in_parts,
)

LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200)

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def rounding(mixer, rows) -> float:
    """What two cuts of these rows may differ by, of the largest entry.

    fp32 rounds each of some 200 dependent products once: 1e-5. And a chunk takes the
    decay between two of its tokens from two sums of log-decays, each rounded to 2^-24
    of itself. So in two cuts an exponent differs by up to four times that, and exp has
    the relative error that its exponent has absolutely.
    """
    log_decays = mixer.front.forward(rows, mixer.front_parameters, None).g
    largest_sum = min(len(rows), CHUNK) * log_decays.abs().max().item()
    return 1e-5 + 4 * 2**-24 * largest_sum


def assert_close(found, expected, unit, what=""):
    bound = unit * expected.abs().max().item()
    torch.testing.assert_close(
        found, expected, rtol=0, atol=bound, msg=lambda message: f"{what}: {message}"
    )


def cuts(length: int):
    """Each as (prefill, decode...), one token at the end, everything decoded,
    chunks."""
    yield (length,)
    yield (-length,)
    for first in sorted({1, 2, 3, 4, 63, 64, 65, length - 1}):
        if 0 < first < length:
            yield (first, length - first)
            if length - first < 8:
                yield (first, first - length)
    if length > 8:
        yield (1, 1, 1, 2, -1, length - 8, -1, -1)


def hold_every_cut(kind, length, some_cuts, B=2):
    mixer = kind.mixer()
    rows = kind.rows(length, B)
    whole = kind.trained(rows)
    _, end = prefilled(mixer, rows)
    unit = rounding(mixer, rows)
    for parts in some_cuts:
        mixed, memory = run_in_parts(mixer, rows, parts)
        assert_close(mixed, whole, unit, parts)
        assert_close(memory.state, end.state, unit, parts)
        assert torch.equal(memory.history, end.history), parts


@pytest.mark.each_value
@pytest.mark.parametrize("length", LENGTHS)
def test_any_cut_gives_what_the_whole_gives(kind, length):
    hold_every_cut(kind, length, cuts(length))


@pytest.mark.nightly
@pytest.mark.parametrize("length", range(1, 201))
def test_every_split_of_every_length(kind, length):
    splits = [(n, length - n) for n in range(1, length)]
    hold_every_cut(kind, length, [*splits, *((a, -b) for a, b in splits[-8:])], B=1)


def test_packed_requests_of_unequal_length_go_on_from_their_own_memory(kind):
    mixer = kind.mixer()
    first = (3, 70, 1, 0, 64, 5)
    more = (130, 2, 0, 4, 1, 64)
    sequences = [kind.rows(a + b, 1)[:, :] for a, b in zip(first, more, strict=True)]
    memory = empty_memory(mixer, sequences[0], len(sequences))
    mixed = [[] for _ in sequences]
    starts = [0] * len(sequences)
    for lengths in (first, more):
        pieces = [
            x[a : a + n] for x, a, n in zip(sequences, starts, lengths, strict=True)
        ]
        documents = documents_of(lengths)
        out = prefill(
            torch.cat(pieces), mixer, memory, documents, begins=lengths is first
        )
        for n, piece in enumerate(out.split(list(lengths))):
            mixed[n].append(piece)
        starts = [a + n for a, n in zip(starts, lengths, strict=True)]
    for n, rows in enumerate(sequences):
        unit = rounding(mixer, rows)
        assert_close(torch.cat(mixed[n]), kind.trained(rows), unit)
        _, alone = prefilled(mixer, rows)
        assert torch.equal(memory.history[n], alone.history[0])
        assert_close(memory.state[n], alone.state[0], unit)
    token = kind.rows(1, len(sequences))
    out = decode(token, mixer, memory)
    for n, rows in enumerate(sequences):
        rows = torch.cat([rows, token[:, n : n + 1]])
        assert_close(out[:, n : n + 1], kind.trained(rows)[-1:], rounding(mixer, rows))


def test_a_request_without_tokens_keeps_its_memory(kind):
    mixer = kind.mixer()
    _, memory = prefilled(mixer, kind.rows(9, 2))
    before = copied(memory)
    prefill(kind.rows(7), mixer, memory, documents_of((0, 7)))
    assert torch.equal(memory.state[0], before.state[0])
    assert torch.equal(memory.history[0], before.history[0])
    assert not torch.equal(memory.state[1], before.state[1])


def test_several_tokens_at_once_have_the_bits_of_one_by_one_and_roll_back_exactly(kind):
    mixer = kind.mixer()
    _, memory = prefilled(mixer, kind.rows(21, 3))
    at = copied(memory)
    steps = memory.steps(5)
    tokens = kind.rows(5, 3)
    mixed = decode(tokens, mixer, memory, steps)
    alone = [copied(at)]
    for n in range(5):
        out = decode(tokens[n : n + 1], mixer, at)
        assert torch.equal(out, mixed[n : n + 1])
        alone.append(copied(at))
    assert all(map(torch.equal, memory[:2], at[:2]))
    accepted = torch.tensor([0, 5, 2])
    choose(memory, steps, accepted)
    for n, count in enumerate(accepted.tolist()):
        assert torch.equal(memory.state[n], alone[count].state[n])
        assert torch.equal(memory.history[n], alone[count].history[n])


def test_steps_are_of_memory_without_slots_and_laid_as_it_is(kind):
    _, memory = prefilled(kind.mixer(), kind.rows(9, 2))
    for state in (memory.state, memory.state.mT):
        steps = memory._replace(state=state).steps(2)
        assert steps.state.shape == (2, 3, *state.shape[1:])
        assert steps.state.stride()[2:] == state.stride()[1:]
        assert torch.equal(steps.state[:, 0], state)
        assert torch.equal(steps.history[:, 0], memory.history)
    with pytest.raises(ValueError, match="memory without slots"):
        memory._replace(slots=torch.tensor([1, -1])).steps(2)


def test_bf16_rows_leave_fp32_states(kind):
    mixer = kind.mixer(torch.bfloat16)
    rows = kind.rows(70, 2, torch.bfloat16)
    mixed, memory = run_in_parts(mixer, rows, (33, 30, -7))
    assert (
        memory.state.dtype == torch.float32 and memory.history.dtype == torch.bfloat16
    )
    # Both round o once before the norm and once after it: two units of 2^-8 of the
    # largest.
    whole = kind.trained(rows)
    bound = 2 * 2**-8 * whole.abs().max().item()
    torch.testing.assert_close(mixed, whole, rtol=0, atol=bound)


def test_tokens_one_by_one_in_fp64_are_the_chunks_of_training(kind):
    """Sums of some 100 products, each rounded to 1e-16; decays of sums of up to 100."""
    rows = kind.rows(70, 2, torch.float64)
    parameters = kind.draw(torch.float64).to(torch.float64)
    mixed, _ = run_in_parts(kind.make(rows, parameters, kind.plain), rows, (-70,))
    assert_close(mixed, kind.train(rows, parameters, kind.plain, None), 1e-11)


def in_slots(memory, **changes):
    return memory._replace(**{"slots": torch.arange(2), **changes})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c._replace(state=c.state[:1]), "state must be"),
        (lambda c: c._replace(state=c.state.bfloat16()), "torch.bfloat16"),
        (lambda c: c._replace(history=c.history[..., 1:]), "history must be"),
        (lambda c: c._replace(history=c.history.double()), "torch.float64"),
        (lambda c: in_slots(c, state=c.state[:, 1:]), "state must be"),
        (lambda c: in_slots(c, history=c.history[..., 1:]), "history must be"),
        (lambda c: in_slots(c, state=c.state.bfloat16()), "torch.bfloat16"),
        (lambda c: in_slots(c, slots=torch.arange(1)), "for 2 sequences"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused_in_words(kind, change, words):
    mixer = kind.mixer()
    memory = change(mixer.memory_shape.zeros(2, torch.float32, torch.device("cpu")))
    for call in (prefill, decode):
        with pytest.raises(ValueError, match=words):
            call(kind.rows(3, 2), mixer, memory)


@pytest.mark.parametrize("aligned", [False, True], ids=["free", "on the grid"])
@pytest.mark.parametrize(("S", "B"), [(0, 2), (5, 0), (0, 0)])
def test_a_prefill_without_tokens_changes_no_memory_but_that_which_begins(
    kind, S, B, aligned
):
    mixer = kind.mixer(aligned=aligned)
    _, memory = prefilled(mixer, kind.rows(3, 2))
    memory = Memory(*(x[:B] for x in memory[:2]))
    before = copied(memory)
    for begins in (False, True):
        mixed = prefill(kind.rows(S, B), mixer, memory, begins=begins)
        assert mixed.shape == kind.trained(kind.rows(S, B)).shape
        for now, then in zip(memory[:2], before[:2], strict=True):
            assert torch.equal(now, then * (not begins))


def test_rows_that_do_not_fit_are_refused_in_words(kind):
    mixer = kind.mixer()
    with pytest.raises(ValueError, match="batch of 1"):
        prefilled(mixer, kind.rows(4, 2), documents_of((2, 2)))
    with pytest.raises(ValueError, match="ends at 3, which does not match the 4"):
        prefilled(mixer, kind.rows(4), documents_of((2, 1)))
    with pytest.raises(ValueError, match="no token"):
        decode(
            kind.rows(0, 2),
            mixer,
            mixer.memory_shape.zeros(2, torch.float32, torch.device("cpu")),
        )
