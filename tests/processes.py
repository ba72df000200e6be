"""Processes of their own: this Python with other arguments, forks, and waiting for what
they do."""

import fcntl
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
PATIENCE = 30  # seconds on a busy machine
# The garbage of this process may wait, when it is deleted, for threads that a fork does
# not have.
os.register_at_fork(after_in_child=gc.freeze)


def python(*arguments, cwd=ROOT, timeout=300, ends=0, **environment):
    """This Python with the repository among its imports; it must end with the code
    ``ends``."""
    # Packages may come by PYTHONPATH alone.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == ends, done.stdout[-4000:] + done.stderr[-8000:]
    return done


def imported_python(script: Path, *arguments: object, timeout=300) -> str:
    """What a script prints that runs in its folder, in a process which has imported
    Megatron already; its small fused functions are not compiled."""
    from tests.ranks import _context

    process = _context("gloo").Process(target=_run_script, args=(script, *arguments))
    process.start()
    process.join(timeout)
    process.kill()
    process.join()
    assert process.exitcode == 0, script.with_suffix(".err").read_text()[-8000:]
    return script.with_suffix(".out").read_text()


# Forgets these packages, and ours, which imports them; what imports one from now on
# fails.
_WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"{{name}} is absent", name=name)
sys.meta_path.insert(0, Absent())
for module in list(sys.modules):
    if module.split(".")[0] in {names} | {{"megatron_gdn"}}:
        del sys.modules[module]
"""


def python_without(names: str, code: str, folder: Path, *arguments: object) -> str:
    """What the code prints where none of these packages can be imported, as
    `imported_python`."""
    script = folder / "without.py"
    script.write_text(_WITHOUT.format(names=set(names.split())) + code)
    return imported_python(script, *arguments).strip()


def _run_script(script: Path, *arguments: object) -> None:
    os.chdir(script.parent)
    sys.stdout, sys.stderr = (
        script.with_suffix(end).open("w", 1) for end in (".out", ".err")
    )
    sys.argv, sys.path[0] = [str(script), *map(str, arguments)], str(script.parent)
    import torch

    torch.compiler.set_stance("force_eager")
    runpy.run_path(str(script), run_name="__main__")


def torchrun(ranks, *arguments, **options) -> str:
    """What a script, or ``-m`` a module, prints over so many ranks."""
    start = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"
    return python(*start, *arguments, **options).stdout


def fork(function, *args) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_free(lock: Path) -> bool:
    """Whether no process holds the lock of this file."""
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
