"""A rank that ends or hangs in the middle of a run: the others end in time with a line
that names it, and the run goes on bit for bit."""

import re
import signal
import time
from functools import partial

import pytest
import torch

from tests.examples import faults
from tests.examples.launching import TIMEOUT_S, TINY, Launch, metrics, run

pytestmark = pytest.mark.slow

LIMIT_S = 9  # of a collective
# The question who is missing, and a machine on which other tests run.
PATIENCE_S = LIMIT_S + 60
SILENT = "rank 1 does not answer: it has ended, or it is stopped"
# What the others say.
NAMED = {
    faults.end: SILENT,
    faults.stop_whole: SILENT,
    faults.stall: r"rank 1 is at faults\.py:\d+ in stall",
    faults.lose_the_message: "rank 1 ",  # gloo may end a rank that gets another size
    faults.fill_the_disk: "rank 1: OSError: .*File too large",
}
CASES = [
    *((place, faults.end) for place in faults.PLACES),
    ("before the exchange", faults.stall),
    ("in a save", faults.stall),
    ("after the exchange", faults.stop_whole),
    ("in the exchange", faults.lose_the_message),
    ("in a save", faults.fill_the_disk),
]
# The run goes on after these. The others leave the files that "after the exchange"
# leaves.
GO_ON = [
    ("after the exchange", faults.end),
    *(case for case in CASES if case[0] == "in a save"),
]
SETTINGS = [*TINY, "--save-interval=3", "--sample-tokens=0"]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> list[dict]:
    cwd = tmp_path_factory.mktemp("whole")
    run(*SETTINGS, "--data", text, cwd=cwd)
    return metrics(cwd / "runs/pretrain_hybrid")


@pytest.mark.parametrize(("place", "fault"), CASES)
def test_a_faulty_rank_is_named_in_time_and_the_run_goes_on(
    place, fault, whole, text, tmp_path
):
    limit = f"--distributed-timeout-minutes={LIMIT_S / 60}"
    plant = partial(faults.plant, place, fault)
    launch = Launch(*SETTINGS, limit, "--data", text, cwd=tmp_path, limit=plant)
    sound, faulty = launch._ranks
    launch.until(lambda: f"step {faults.STEP - 1} " in launch.printed)
    began = time.monotonic()
    sound.join(PATIENCE_S)
    printed = launch.printed
    launch.send(signal.SIGKILL)  # the faulty rank, as torchrun would
    faulty.join()
    assert sound.exitcode == 1, printed
    assert time.monotonic() - began < PATIENCE_S
    said = [line for line in printed.splitlines() if "rank 0: " in line]
    assert len(said) == 1, printed
    assert re.search(NAMED[fault], said[0]), printed
    assert "saved is step 3, " in said[0], printed
    if (place, fault) not in GO_ON:
        return
    run("--resume", cwd=tmp_path)
    assert metrics(tmp_path / "runs/pretrain_hybrid") == whole


@pytest.mark.parametrize("fault", [faults.end, faults.stall])
def test_a_faulty_rank_is_named_where_collectives_raise_nothing(fault, text, tmp_path):
    """As with NCCL: the main thread of the other rank stands still until the end."""
    limit = f"--distributed-timeout-minutes={LIMIT_S / 60}"
    plant = partial(faults.plant_where_nothing_raises, "in the exchange", fault)
    launch = Launch(*SETTINGS, limit, "--data", text, cwd=tmp_path, limit=plant)
    said = f"rank 0: no step for .*{NAMED[fault]}"
    deadline = time.monotonic() + TIMEOUT_S
    while not re.search(said, launch.printed) and time.monotonic() < deadline:
        time.sleep(0.1)
    printed = launch.printed
    launch.send(signal.SIGKILL)
    for rank in launch._ranks:
        rank.join()
    assert re.search(said, printed), printed


NCCL_LIMIT_S = 40
ON_GPUS = ["--deterministic", "--transformer-impl=local"]


@pytest.fixture(scope="module")
def whole_on_gpus(text, tmp_path_factory) -> list[dict]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    cwd = tmp_path_factory.mktemp("whole_on_gpus")
    run(*SETTINGS, *ON_GPUS, "--data", text, cwd=cwd)
    return metrics(cwd / "runs/pretrain_hybrid")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("in the exchange", faults.end),
        ("after the exchange", faults.stall),
        ("in a save", faults.end),
    ],
)
def test_a_faulty_gpu_is_named_before_nccl_ends_the_others_and_the_run_goes_on(
    place, fault, whole_on_gpus, text, tmp_path
):
    settings = [*SETTINGS, *ON_GPUS, "--data", text]
    limit = f"--distributed-timeout-minutes={NCCL_LIMIT_S / 60}"
    plant = partial(faults.plant, place, fault)
    launch = Launch(*settings, limit, cwd=tmp_path, limit=plant)
    sound, faulty = launch._ranks
    launch.until(lambda: f"step {faults.STEP - 1} " in launch.printed)
    sound.join(NCCL_LIMIT_S + PATIENCE_S)
    printed = launch.printed
    launch.send(signal.SIGKILL)
    faulty.join()
    assert sound.exitcode, printed
    assert re.search(f"rank 0: no step for .*{NAMED[fault]}", printed), printed
    run("--resume", cwd=tmp_path)
    assert metrics(tmp_path / "runs/pretrain_hybrid") == whole_on_gpus
