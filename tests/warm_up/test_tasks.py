"""Tasks in forks of this process."""

import io
import os
import time
from functools import partial

import pytest

from megatron_gdn.warm_up.tasks import Progress, Task, run_tasks


def touch(path, seconds: float = 0.0) -> bool:
    time.sleep(seconds)
    path.touch()
    return True


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def fail() -> bool:
    os.write(1, b"ptxas says no\n")
    raise RuntimeError("not compiled")


def test_all_are_run_and_a_failure_is_quoted_and_stops_no_other(tmp_path):
    paths = [tmp_path / str(n) for n in range(5)]
    tasks = [Task(path.name, partial(touch, path)) for path in paths]
    tasks += [Task("bad", fail), Task("there", lambda: False)]
    done = []
    compiled, failures = run_tasks(tasks, 3, done.append)
    assert all(path.exists() for path in paths) and len(done) == len(tasks)
    assert compiled == 5, "not the one that was there"
    (failure,) = failures
    assert failure.name == "bad"
    assert "ptxas says no" in failure.output and "RuntimeError: not compiled" in failure.output


def test_the_heaviest_begin_first_and_equals_in_their_order(tmp_path):
    order = tmp_path / "order"

    def note(name: str) -> bool:
        with open(order, "a") as file:
            file.write(name)
        return True

    weights = {"a": 0, "b": 2, "c": 0, "d": 5}
    tasks = [Task(name, partial(note, name), weight=weights[name]) for name in weights]
    run_tasks(tasks, 1, lambda task: None)
    assert order.read_text() == "dbac"


@pytest.mark.parametrize(("hurry", "most"), [(False, 4), (True, 2)])
def test_in_a_hurry_others_leave_half_of_the_cores_to_what_is_wanted_soon(tmp_path, hurry, most):
    def others() -> int:
        return len(list(tmp_path.glob("other *")))

    def soon() -> bool:
        until(lambda: others() == most - 1)
        time.sleep(0.3)  # for one too many
        (tmp_path / "seen").write_text(str(others()))
        return True

    def other(number: int) -> bool:
        (tmp_path / f"other {number}").touch()
        until((tmp_path / "seen").exists)
        return True

    tasks = [Task("soon", soon, weight=1, soon=True)]
    tasks += [Task(str(n), partial(other, n)) for n in range(3)]
    assert run_tasks(tasks, 4, lambda task: None, hurry) == (4, [])
    assert int((tmp_path / "seen").read_text()) == most - 1


def test_progress_without_a_terminal_is_lines():
    out = io.StringIO()
    progress = Progress(2, every=0, out=out)
    for name in ("a", "b"):
        progress.done(Task(name, lambda: True))
    progress.close()
    first, last = out.getvalue().splitlines()
    assert first.startswith("1 of 2 ") and last.startswith("2 of 2 ") and "(b)" in last
