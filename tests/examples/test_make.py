"""`make` finds a Python that runs and is new enough."""

import os
import subprocess
import sys

from tests.examples.launching import ROOT

# What pyenv puts on PATH for a version that another folder has chosen.
SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
OLD = "#!/bin/sh\nexit 1\n"  # what an older Python answers to the question for its version


def chosen(folder) -> str:
    """What `make` takes for PYTHON if ``folder`` is all that has Pythons."""
    path = os.pathsep.join([str(folder), "/usr/bin", "/bin"])
    shown = subprocess.run(
        ["make", "--no-print-directory", "--eval", "shown: ; @echo $(PYTHON)", "shown"],
        cwd=ROOT, env={"PATH": path, "PYENV_ROOT": str(folder)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return shown.stdout.strip()


def test_a_shim_without_its_version_and_an_older_python_are_passed_over(tmp_path):
    for name, script in (("python3.12", SHIM), ("python3", OLD)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "python3.13").symlink_to(sys.executable)
    assert chosen(tmp_path) == "python3.13"
