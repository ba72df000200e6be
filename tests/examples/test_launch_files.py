"""The shell files of examples/launch start all processes of a script, on a CPU and with stand-ins
for Slurm's two programs."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.launching import ROOT

FILES = sorted((ROOT / "examples/launch").glob("*.sh"))
SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.zeros(dist.get_world_size())
ranks[dist.get_rank()] = 1
dist.all_reduce(ranks)
patched = "megatron_gdn.enable" in sys.modules
if dist.get_rank() == 0:
    Path(sys.argv[2]).write_text(f"{ranks.tolist()} {sys.argv[1:2]} {patched}")
dist.destroy_process_group()
"""
SRUN = """#!/usr/bin/env bash
shift  # the flag
SLURM_NODEID=0 "$@" &
SLURM_NODEID=1 "$@"
wait
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[0-1]" ] && echo localhost && echo other
"""


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return str(listening.getsockname()[1])


def launch(folder: Path, name: str, **environment: str) -> str:
    """What rank 0 of the script saw."""
    script, seen = folder / "pretrain_my.py", folder / "seen"
    script.write_text(SCRIPT)
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    more = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PORT": free_port()}
    run = subprocess.run(
        [ROOT / "examples/launch" / name, script, "--lr", seen], cwd=ROOT, timeout=200,
        env=os.environ | more | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return seen.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_legal_bash(file):
    subprocess.run(["bash", "-n", file], check=True)
    assert os.access(file, os.X_OK)


def test_one_node_starts_a_process_for_each_gpu(tmp_path):
    assert launch(tmp_path, "one_node.sh", GPUS="2") == "[1.0, 1.0] ['--lr'] True"


@pytest.mark.slow
def test_slurm_starts_the_processes_of_all_nodes(tmp_path):
    for name, code in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "7"}
    assert launch(tmp_path, "slurm.sh", GPUS="1", **slurm) == "[1.0, 1.0] ['--lr'] True"


def test_a_node_that_does_not_know_its_number_says_so():
    run = subprocess.run(
        [ROOT / "examples/launch/several_nodes.sh", "x.py"],
        env={"PATH": os.environ["PATH"], "NODES": "2"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode != 0 and "which of them this is, from 0" in run.stderr
