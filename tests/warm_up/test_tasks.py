"""Tasks in forks of this process."""

import os
import signal
import time
from functools import partial

from megatron_gdn.warm_up.tasks import Task, run_tasks


def touch(path, seconds: float = 0.0) -> bool:
    time.sleep(seconds)
    path.touch()
    return True


def fail() -> bool:
    os.write(1, b"what compilers print\n")
    raise RuntimeError("ptxas says no")


def test_all_are_run_and_a_failure_is_quoted_and_stops_no_other(tmp_path, capfd):
    paths = [tmp_path / str(n) for n in range(5)]
    tasks = [Task(path.name, partial(touch, path)) for path in paths]
    tasks += [Task("bad", fail), Task("there", lambda: False)]
    compiled, failures = run_tasks(tasks, 3)
    assert all(path.exists() for path in paths)
    assert compiled == 5, "not the one that was there"
    ((name, said),) = failures.items()
    assert name == "bad" and "RuntimeError: ptxas says no" in said
    printed = capfd.readouterr().out
    assert "7 of 7 kernels after " in printed and "compilers" not in printed


def test_tasks_begin_in_their_order_and_none_are_no_error(tmp_path):
    order = tmp_path / "order"

    def note(name: str) -> bool:
        with open(order, "a") as file:
            file.write(name)
        return True

    run_tasks([Task(name, partial(note, name)) for name in "dbac"], 1)
    assert order.read_text() == "dbac"
    assert run_tasks([], 0) == (0, {})


def test_every_task_has_a_process_of_its_own_and_a_crash_stops_no_other(tmp_path):
    def note() -> bool:
        (tmp_path / str(os.getpid())).touch()
        return True

    def crash() -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    tasks = [Task("a", note), Task("crashes", crash), Task("b", note), Task("c", note)]
    compiled, failures = run_tasks(tasks, 1)
    assert (compiled, list(failures)) == (3, ["crashes"])
    assert len(list(tmp_path.iterdir())) == 3
