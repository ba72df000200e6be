"""Launches of Megatron's pretrain_hybrid.py over the GPUs of this machine, and what
their logs say.

MEGATRON_LM is a clone of the branch core_r0.19.0, or a folder with the clones mlm-core
(this branch), mlm-main and mlm-dev.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .commands import ROOT
from .measure import summary_of

if TYPE_CHECKING:
    from .session import Session

DATA = tomllib.loads((ROOT / "benchmarks" / "launches.toml").read_text())
FLAGS = DATA["flags"]
SPECS = {
    "ours": "megatron_gdn.specs hybrid_stack_spec",
    "upstream": "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
}


def clone_of(branch: str = "core") -> Path:
    """The clone of "core", "main" or "dev"."""
    given = Path(os.environ.get("MEGATRON_LM", ""))
    folder = given / f"mlm-{branch}"
    if branch == "core" and not folder.exists():
        folder = given
    if not (folder / "pretrain_hybrid.py").exists():
        raise SystemExit(
            f"{folder} is no clone of Megatron-LM; MEGATRON_LM must name a clone, or "
            "a folder with the clones mlm-core, mlm-main and mlm-dev."
        )
    return folder.resolve()


def chosen(session: Session, known: dict[str, Any]) -> list[str]:
    """The launches of ``--cases``, or all that are known."""
    unknown = set(session.args.cases or ()) - set(known)
    if unknown:
        raise SystemExit(
            f"no launches {sorted(unknown)}; there are {', '.join(known)}."
        )
    return session.args.cases or list(known)


def note_megatron(session: Session) -> None:
    """Adds the clone's commit to the setting of all records."""
    asked = ["git", "-C", str(clone_of()), "log", "-1", "--format=%h"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False)
    called = session.row.get("called") or commit.stdout.strip()
    session.setting["environment"]["megatron-lm"] = called


def last_value(flags: list[str], flag: str) -> str:
    """Of two equal flags Megatron takes the last."""
    return flags[len(flags) - flags[::-1].index(flag)]


def on_cpu(flags: list[str], pattern: str) -> list[str]:
    """The flags of a tiny launch without a GPU."""
    from tests.launches.on_cpu import WITHOUT_GPU

    upstream = "tests.launches.upstream_layers hybrid_stack"
    flags = " ".join(flags).replace(SPECS["upstream"], upstream).split()
    flags += FLAGS["toy"].split()
    return [*flags, *WITHOUT_GPU.split(), "--hybrid-layer-pattern", pattern]


def launch(
    session: Session,
    name: str,
    flags: list[str],
    gpus: list[int],
    *,
    branch: str = "core",
    launcher: bool = False,
    killed_at: str = "",
    **environment: str,
) -> dict[str, Any]:
    """What a launch printed; "failed" if it did.

    Args:
        session: with ``--tiny`` the launch runs on a CPU, as the tests' launches do.
        name: of the log, which has what all ranks print; it stands beside ``--out``.
        gpus: their numbers; rank i takes the i-th.
        branch: of the clone.
        launcher: run the script by ``-m megatron_gdn.launch``.
        killed_at: a pattern of the log at which all processes are killed.
        **environment: variables.
    """
    began = time.monotonic()
    records = Path(session.args.out or ROOT / "runs" / "launches" / "records.jsonl")
    records.parent.mkdir(parents=True, exist_ok=True)
    log = records.resolve().with_name(f"{name}.log".replace(" ", "-"))
    command = [str(clone_of(branch) / "pretrain_hybrid.py"), *flags]
    if launcher:
        command = ["megatron_gdn.launch", *command]
    if session.args.tiny:
        command = ["tests.launches.on_cpu", *command]
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if launcher or session.args.tiny:
        command = ["-m", *command]
    ranks = str(len(gpus))
    shared = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **environment,
    }
    processes = []
    with log.open("w") as file:
        for rank in map(str, range(len(gpus))):
            process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=file,
                stderr=file,
                cwd=ROOT,
                start_new_session=True,
            )
            processes.append(process)
    limit = min(session.row["limit"], session.left())
    failed = wait(processes, log, began + limit, killed_at)
    found = read(log.read_text(errors="replace"))
    found["seconds"] = round(time.monotonic() - began, 1)
    if failed:
        found["failed"] = failed
    return found


def wait(
    processes: list[subprocess.Popen], log: Path, end: float, killed_at: str
) -> str:
    """Wait for the end of a launch; what went wrong, or "" if nothing did."""

    def kill() -> None:
        for process in processes:
            # a rank that has ended may have left processes of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    while any(process.poll() is None for process in processes):
        if killed_at and re.search(killed_at, log.read_text(errors="replace")):
            kill()
            return ""
        if any(process.poll() for process in processes):
            time.sleep(2)  # the others may print why
            kill()
        elif time.monotonic() > end:
            kill()
            return "killed, its time was over"
        time.sleep(0.05)
    if killed_at:
        return f"ended before its log had {killed_at!r}"
    if not any(process.returncode for process in processes):
        return ""
    text = log.read_text(errors="replace").strip()
    error = r"^(?:\[rank\d+\]: ?)?\S*(?:Error|Exception)\b.*"
    errors = re.findall(error, text, flags=re.M)
    return (errors or text.splitlines()[-1:] or ["no output"])[0][:300]


def read(text: str) -> dict[str, Any]:
    """Times of the steps of a log in ms, peak of allocated memory in MiB, losses by
    step.

    Megatron's second line has the means of the first two steps.
    """
    line = r"iteration +(\d+)/.*?iteration \(ms\): (\S+) .*?lm loss: (\S+)"
    found = re.findall(line, text)
    if not found:
        return {}
    steps = [int(step) for step, _, _ in found]
    times = [float(ms) for _, ms, _ in found]
    losses = [float(loss) for _, _, loss in found]
    if len(found) > 1:
        times[1] = round(2 * times[1] - times[0], 1)
        losses[1] = round(2 * losses[1] - losses[0], 6)
    peaks = re.findall(r"max allocated: ([\d.]+)", text)
    return {
        "step_ms": spread(times),
        "first_ms": times[:2],
        "peak": max(map(float, peaks), default=0.0),
        "losses": dict(zip(steps, losses, strict=True)),
    }


def spread(times: list[float]) -> dict[str, float]:
    """Of the steps after warm-up: a fifth of them, in which kernels compile and graphs
    are made."""
    kept = times[len(times) // 5 :]
    return summary_of(kept) | {"least": min(kept)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
