"""Runs the kernel tests of ``tests/kernels`` in Triton's interpreter, on machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/kernels runs compiled, marked gpu")
def test_the_kernels_pass_their_tests_in_the_interpreter():
    """In three processes of like length: the interpreter uses one core each."""
    pytest.importorskip("triton")
    root = HERE.parents[1]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    kernels = HERE.parent / "kernels"
    longest = kernels / "test_front.py"
    part = "every_gradient"
    runs = [
        subprocess.Popen(
            [*command, *map(str, files)], env=environment, cwd=root, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for files in (
            [longest, "-k", part],
            [longest, "-k", f"not {part}"],
            [kernels, f"--ignore={longest}"],
        )
    ]  # fmt: skip
    for run in runs:
        printed, _ = run.communicate()
        assert run.returncode == 0, printed[-8000:]
