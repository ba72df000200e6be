"""Faults of one rank of the example, planted in its process before the run begins."""

import os
import resource
import signal
import time

FAULTY = 1  # the rank
STEP = 5  # in which it happens


def end() -> None:
    """As the system ends a process whose memory is too large."""
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    time.sleep(3600)


def stop_whole() -> None:
    """Every thread of the process stands still, as on a machine that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_the_disk() -> None:
    """No file of this rank may grow beyond this size, as on a full disk of its own."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))


LOST = "lost"


def lose_the_message() -> str:
    return LOST


def plant(place: str, fault) -> None:
    """Let ``fault`` happen on the faulty rank at this place of step `STEP`."""
    if int(os.environ["RANK"]) == FAULTY:
        PLACES[place](fault)


def plant_where_nothing_raises(place: str, fault) -> None:
    """`plant`; an error of the other ranks' collectives shows in nothing but time."""
    from pretraining import loop, roll_call

    roll_call._collectives_raise = lambda: False
    loop.give_up = lambda *_: time.sleep(3600)
    plant(place, fault)


def _before_the_exchange(fault) -> None:
    _before_the_forward(fault)


def _before_the_forward(call) -> None:
    """``call`` before the forward of step `STEP`, and before each later one."""
    from pretraining import step

    forward = step.forward_step

    def called_before(feed, model):
        if feed.consumed >= STEP - 1:
            call()
        return forward(feed, model)

    step.forward_step = called_before


def _in_the_exchange(fault) -> None:
    """While the other rank waits for this one's message."""
    import torch.distributed as dist

    begun = []

    def faulty(exchange, nothing):
        def call(*args, **kwargs):
            if len(begun) == 1 and fault() == LOST:
                begun.append(None)
                return nothing
            return exchange(*args, **kwargs)

        return call

    _before_the_forward(lambda: begun or begun.append(None))
    dist.all_to_all_single = faulty(dist.all_to_all_single, _Finished())
    dist.batch_isend_irecv = faulty(dist.batch_isend_irecv, [])


class _Finished:
    """The work of an exchange that sent nothing."""

    def wait(self) -> None:
        pass


def _after_the_exchange(fault) -> None:
    from pretraining import step

    norm = step.gradient_norm
    calls = []

    def faulty(optimizer):
        calls.append(None)
        if len(calls) == STEP:
            fault()
        return norm(optimizer)

    step.gradient_norm = faulty


def _in_a_save(fault) -> None:
    from megatron.core import dist_checkpointing

    save = dist_checkpointing.save
    calls = []

    def faulty(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            fault()
        return save(*args, **kwargs)

    dist_checkpointing.save = faulty


PLACES = {
    "before the exchange": _before_the_exchange,
    "in the exchange": _in_the_exchange,
    "after the exchange": _after_the_exchange,
    "in a save": _in_a_save,
}
