"""Which rank the example names when several ranks fail one after the other."""

import threading
import time

import pytest
from torch.distributed import HashStore

from pretraining import roll_call


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(roll_call, "_EVERY_S", 0.01)
    monkeypatch.setattr(roll_call, "_PATIENCE_S", 0.1)


def calls_of(size: int, silent: int) -> list:
    """The roll calls of ``size`` ranks, of which one does not answer."""
    store = HashStore()
    calls = []
    for rank in range(size):
        call = roll_call.RollCall()
        call._store = store
        call._rank = rank
        call._size = size
        if rank != silent:
            threading.Thread(target=call._answer, daemon=True).start()
        calls.append(call)
    return calls


def test_a_rank_that_fails_later_names_the_rank_that_the_first_one_named():
    """The first one may have ended by then, and would not answer."""
    first, later, _ = calls_of(3, silent=2)
    silence = "rank 2 does not answer: it has ended, or it is stopped"
    assert first.ask() == silence
    assert later.ask() == silence
    assert not first._store.check(["pretrain_hybrid/roll_call/2"]), "asked again"


def test_a_question_of_an_earlier_step_is_asked_again():
    """A long step was asked about, and ended; a later one fails."""
    first, later, _ = calls_of(3, silent=2)
    assert first._ask() is not None
    while later._question == 1:
        time.sleep(0.01)
    first.note_step()
    later.note_step()
    assert later.ask() is not None
    assert first._store.check(["pretrain_hybrid/roll_call/2"]), "an old answer"


def test_a_rank_that_leaves_asks_the_store_no_more():
    """The store may be gone by then, of which torch would print a warning."""
    call = roll_call.RollCall()
    call._store = HashStore()
    answers = threading.Thread(target=call._answer, daemon=True)
    answers.start()
    call.end()
    answers.join(timeout=10)
    assert not answers.is_alive()
