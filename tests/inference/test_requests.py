"""Requests in slots: forks, copies, saves, loads and roll-backs are exact; mistakes are refused."""

import pytest
import torch

from megatron_gdn.inference import Carry, CarryShape, Request, RequestPool, decode, prefill
from tests.inference.row_mixers import GDN

MIXER = GDN.mixer()
LAYERS = {1: MIXER.shape, 4: CarryShape(6, 2, 3, 5, 7)}  # of two kinds


def make_pool(slots=4, **more) -> RequestPool:
    return RequestPool(LAYERS, slots, dtype=torch.float32, **more)


def other_carry(N: int, seed: int) -> Carry:
    generator = torch.Generator().manual_seed(seed)
    shape = LAYERS[4]
    return Carry(
        torch.randn(N, *shape.history, generator=generator),
        torch.randn(N, *shape.state, generator=generator),
    )


def give(pool, requests, tokens: int, seed=0):
    """Prefill in layer 1, numbers in layer 4."""
    rows = GDN.rows(tokens, len(requests)) + seed
    _, carry = prefill(rows, MIXER, pool.read(1, requests))
    pool.write(1, requests, carry, [tokens] * len(requests))
    pool.write(4, requests, other_carry(len(requests), seed), [tokens] * len(requests))


def bits(pool, *requests) -> list[torch.Tensor]:
    return [x for layer in LAYERS for x in pool.read(layer, requests)]


def same(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def everything(pool) -> list[torch.Tensor]:
    return [tensor.clone() for carry in pool.layers.values() for tensor in carry]


def test_a_request_begins_at_zero_even_in_a_slot_that_was_used():
    pool = make_pool(1)
    first = pool.allocate()
    give(pool, [first], 5)
    assert pool.tokens_of(first) == 5 and pool.free_slots == 0
    pool.free(first)
    second = pool.allocate()
    assert second.slot == first.slot and pool.tokens_of(second) == 0
    assert not any(x.any() for x in bits(pool, second))


def test_forks_copies_saves_and_loads_are_exact_and_go_their_own_way():
    pool = make_pool(5)
    a, b = pool.allocate(), pool.allocate()
    give(pool, [a, b], 9)
    fork, loaded = pool.fork(a), pool.load(pool.save(a))
    stands = bits(pool, a)
    assert same(bits(pool, fork), stands) and same(bits(pool, loaded), stands)
    assert pool.tokens_of(fork) == pool.tokens_of(loaded) == 9
    give(pool, [fork], 3, seed=2)
    assert same(bits(pool, a), stands) and not same(bits(pool, fork), stands)
    pool.copy(a, b)
    pool.copy(a, fork)
    assert same(bits(pool, b), stands) and same(bits(pool, fork), stands)
    assert pool.tokens_of(fork) == 9


def test_a_saved_request_survives_a_file_and_another_pool(tmp_path):
    pool, other = make_pool(), make_pool(2)
    request = pool.allocate(tokens=20)
    give(pool, [request], 9)
    torch.save(pool.save(request), tmp_path / "request.pt")
    loaded = other.load(torch.load(tmp_path / "request.pt"))
    assert same(bits(other, loaded), bits(pool, request))
    assert other.tokens_of(loaded) == 9 and loaded.tokens == 20


def test_roll_back_to_any_accepted_token_is_exact_in_every_layer():
    pool = make_pool()
    requests = [pool.allocate() for _ in range(3)]
    give(pool, requests, 6)
    stood = [bits(pool, request) for request in requests]
    tokens = GDN.rows(4, 3)
    _, after = decode(tokens, MIXER, pool.read(1, requests))
    others = [other_carry(3, seed) for seed in range(4)]
    pool.write(1, requests, after[-1], [4] * 3, after)
    pool.write(4, requests, others[-1], [4] * 3, others)
    pool.roll_back(requests, [0, 4, 1])
    assert same(bits(pool, requests[0]), stood[0])
    for n, count in ((1, 4), (2, 1)):
        expected = [x[n : n + 1] for carry in (after[count - 1], others[count - 1]) for x in carry]
        assert same(bits(pool, requests[n]), expected)
    assert [pool.tokens_of(request) for request in requests] == [6, 10, 7]
    with pytest.raises(ValueError, match="no decode step to roll back"):
        pool.roll_back(requests, [0, 0, 0])


def refuse(pool, words, call, error=ValueError):
    """The call is refused in these words and no slot changes."""
    before, free = everything(pool), pool.free_slots
    with pytest.raises(error, match=words):
        call()
    assert same(everything(pool), before) and pool.free_slots == free


def test_mistakes_are_refused_in_words_and_touch_no_state():
    pool = make_pool(3)
    a, gone = pool.allocate(tokens=8), pool.allocate()
    give(pool, [a, gone], 5)
    pool.free(gone)
    carry = pool.read(1, [a])
    refuse(pool, "was freed; allocate", lambda: pool.read(1, [gone]))
    taken = pool.allocate()
    refuse(pool, "was freed and its slot was given", lambda: pool.write(1, [gone], carry, [1]))
    refuse(pool, "was freed", lambda: pool.free(gone))
    refuse(pool, "was freed", lambda: pool.fork(gone))
    refuse(pool, "another pool", lambda: pool.read(1, [make_pool().allocate()]))
    refuse(pool, "is a int, not a Request", lambda: pool.read(1, [0]), TypeError)
    refuse(pool, "twice in one call", lambda: pool.read(1, [a, a]))
    refuse(pool, "layer 2 has no carries", lambda: pool.read(2, [a]))
    refuse(pool, "8 were announced", lambda: pool.write(1, [a], carry, [4]))
    refuse(pool, "8 were announced", lambda: pool.check(1, [a, taken], [4, 1]))
    refuse(pool, "4 were announced", lambda: pool.fork(a, tokens=4))
    refuse(pool, "numbers of tokens for 2", lambda: pool.write(1, [a], carry, [1, 1]))
    refuse(pool, "for 2 sequences", lambda: pool.write(1, [a, taken], carry, [1, 1]))
    wrong = carry._replace(state=carry.state.bfloat16())
    refuse(pool, "in torch.bfloat16", lambda: pool.write(1, [a], wrong, [1]))
    pool.allocate()
    refuse(pool, "all 3 slots are taken", pool.allocate, RuntimeError)
    refuse(pool, "all 3 slots are taken", lambda: pool.fork(a), RuntimeError)
    refuse(pool, "slots=0", lambda: make_pool(0))


def test_a_request_of_another_model_is_not_loaded():
    pool = make_pool()
    saved = pool.save(pool.allocate())
    other = RequestPool({1: MIXER.shape}, 1, dtype=torch.float32)
    refuse(other, r"layers \[1, 4\]", lambda: other.load(saved))
    half = RequestPool(LAYERS, 1, dtype=torch.bfloat16)
    refuse(half, "history must be", lambda: half.load(saved))


def test_roll_back_of_other_requests_or_counts_is_refused():
    pool = make_pool(3)
    a, b = pool.allocate(), pool.allocate()
    for layer, shape in LAYERS.items():
        carry = shape.zeros(2, torch.float32, "cpu")
        pool.write(layer, [a, b], carry, [2, 2], [carry, carry])
    refuse(pool, "same requests", lambda: pool.roll_back([b, a], [0, 0]))
    refuse(pool, "same requests", lambda: pool.roll_back([a], [0]))
    refuse(pool, "numbers from 0 to 2", lambda: pool.roll_back([a, b], [0, 3]))
    refuse(pool, "numbers from 0 to 2", lambda: pool.roll_back([a, b], [0]))
    pool.free(b)
    again = pool.allocate()
    assert again.slot == b.slot
    refuse(pool, "same requests", lambda: pool.roll_back([a, again], [0, 0]))


def test_a_request_of_the_last_step_that_was_copied_onto_has_nothing_to_roll_back():
    pool = make_pool(3)
    a, b, other = (pool.allocate() for _ in range(3))
    give(pool, [a, b, other], 6)

    def step():
        for layer in LAYERS:
            carry = pool.read(layer, [a, b])
            after = [Carry(*(x + n for x in carry)) for n in (1, 2)]
            pool.write(layer, [a, b], after[-1], [2, 2], after)

    step()
    pool.copy(b, a)
    refuse(pool, "copied onto", lambda: pool.roll_back([a, b], [0, 1]))
    step()
    pool.copy(a, other)  # no request of the step changes
    pool.copy(a, a)
    pool.roll_back([a, b], [0, 1])
    assert pool.tokens_of(a) == 8 and pool.tokens_of(b) == 9 and pool.tokens_of(other) == 10


def test_handles_say_where_they_are():
    assert repr(Request(2, None, make_pool())) == "Request(slot=2, tokens=None)"
