"""Run on every rank: train, save, load at another layout, train on."""

import torch

from tests.parallel import parallel
from tests.precision.training import (
    build,
    load,
    load_model_only,
    save,
    save_by_name,
    tensors_in,
    train_step,
)

BEFORE, AFTER = range(2), range(2, 4)


def train_and_save(kind: str, folder: str) -> list[float]:
    """Losses of all four steps at tp2; the checkpoint is of the middle."""
    with parallel(tp=2):
        training = build(kind, tp=2)
        losses = [train_step(training, step) for step in BEFORE]
        save(training, folder)
        save_by_name(training, f"{folder}/by-name")
        return losses + [train_step(training, step) for step in AFTER]


def resume(kind: str, folder: str, again: str, tp: int) -> list[float]:
    """Losses of the last two steps; what was loaded is saved once more, in ``again``."""
    with parallel(tp=tp):
        training = build(kind, tp=tp, seed=99)
        load(training, folder)
        save_by_name(training, again)
        return [train_step(training, step) for step in AFTER]


def resume_without_optimizer(kind: str, folder: str) -> list[float]:
    with parallel(tp=2):
        training = build(kind, tp=2, seed=99)
        load_model_only(training, folder)
        return [train_step(training, step) for step in AFTER]


def files_are_equal(one: str, other: str) -> int:
    one, other = tensors_in(one), tensors_in(other)
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype, key
        assert torch.equal(value, other[key]), key
    return len(one)
