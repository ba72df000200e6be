"""Launches of a Megatron-LM script over the GPUs of this machine, and what their logs
say.

python lib/launching.py --hold train SCRIPT FLAGS     one rank, see `hold`
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = tomllib.loads((ROOT / "benchmarks" / "launches.toml").read_text())
FLAGS = DATA["flags"]
HOLD = "--hold"
LAUNCHER = "megatron_gdn.launch"
SPECS = {
    "ours": "megatron_gdn.specs hybrid_stack_spec",
    "upstream": "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
}


def on_cpu(flags: list[str]) -> list[str]:
    """The flags of a tiny launch without a GPU."""
    from tests.launches.on_cpu import WITHOUT_GPU

    upstream = "tests.launches.upstream_layers hybrid_stack"
    flags = " ".join(flags).replace(SPECS["upstream"], upstream).split()
    return [*flags, *FLAGS["toy"].split(), *WITHOUT_GPU.split()]


def large_model(
    hidden: str, tokens: tuple[int, int, int], steps: int, spec: str
) -> list[str]:
    """Flags of the model whose steps are timed.

    Args:
        tokens: sequences in a micro-batch, tokens in each, sequences in a step.
    """
    batch, length, in_a_step = tokens
    size = f"--micro-batch-size {batch} --global-batch-size {in_a_step}"
    size += f" --seq-length {length} --max-position-embeddings {length}"
    run = f"--train-iters {steps} --log-memory-interval {steps} --spec {SPECS[spec]}"
    fixed = f"{FLAGS['base']} {DATA['data']['mock']} {DATA['hidden'][hidden]}"
    return f"{fixed} {size} {run}".split()


def hold(until: str, arguments: list[str]) -> None:
    """Be ``python *arguments``, in two waits for a line of stdin.

    The first wait comes after the imports of a launch. If ``until`` is "train", the
    second one comes when the model is built, before the first step.
    """
    import runpy
    from importlib import import_module

    script, *flags = arguments[arguments[0] == LAUNCHER :]
    sys.path[0] = str(Path(script).parent)
    training = import_module("megatron.training.training")
    import_module(flags[flags.index("--spec") + 1])
    sys.stdin.readline()
    if until == "train":
        train = training.train

        def train_when_told(*args: Any, **kwargs: Any) -> Any:
            print("waits before the first step", flush=True)
            sys.stdin.readline()
            return train(*args, **kwargs)

        training.train = train_when_told
    if arguments[0] == LAUNCHER:
        import_module(LAUNCHER).main([script, *flags])
        return
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


class Launch:
    """The processes of one launch. They wait until `release` is called.

    Args:
        script: the script's file.
        log: what all ranks print.
        ranks: the number of processes.
        gpus: the numbers of the GPUs that they see; rank i takes the i-th.
        launcher: run the script by ``-m megatron_gdn.launch``.
        until: what a second `release` lets go on: "train", or "" for no second wait.
        toy: run on a CPU, as the tests' launches run.
        **environment: variables; None removes one.
    """

    def __init__(
        self,
        script: Path,
        flags: list[str],
        log: Path,
        *,
        ranks: int = 1,
        gpus: list[int] | None = None,
        launcher: bool = False,
        until: str = "",
        toy: bool = False,
        **environment: str | None,
    ) -> None:
        self.log = log
        arguments = [LAUNCHER] * launcher + [str(script), *flags]
        command = [sys.executable, __file__, HOLD, until, *arguments]
        if toy:
            command = [sys.executable, "-m", "tests.launches.on_cpu", *arguments]
            environment["TORCHDYNAMO_DISABLE"] = "1"
        elif gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        shared = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **environment,
        }
        self.processes = []
        with log.open("a") as file:
            for rank in range(ranks):
                given = (
                    os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
                process = subprocess.Popen(
                    command,
                    env={
                        name: value
                        for name, value in given.items()
                        if value is not None
                    },
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    text=True,
                    cwd=ROOT,
                    start_new_session=True,
                )
                self.processes.append(process)

    def release(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            # it has failed: its log says why
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("\n")
                process.stdin.flush()

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def finish(self, seconds: float, killed_at: str = "") -> str:
        """Wait for the end; what went wrong, or "" if nothing did.

        If ``killed_at`` is a pattern, all processes are killed as soon as the log has
        it.
        """
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            if killed_at and re.search(killed_at, self.text()):
                self.kill()
                return ""
            failed = any(process.poll() for process in self.processes)
            if failed:
                time.sleep(2)  # the others may print why
                self.kill()
            elif time.monotonic() > end:
                self.kill()
                return f"killed after {seconds:.0f} s"
            time.sleep(0.05)
        if killed_at:
            return f"ended before its log had {killed_at!r}"
        if not any(process.returncode for process in self.processes):
            return ""
        lines = self.text().splitlines()
        errors = [
            line
            for line in lines
            if re.match(r"(\[rank\d+\]: ?)?\S*(Error|Exception)\b", line)
        ]
        return (errors or lines or ["no output"])[0 if errors else -1][:300]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float) -> bool:
        """Whether the log has these words before ``seconds`` are over and no process
        has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and all(p.poll() is None for p in self.processes):
            if self.text().count(words) >= len(self.processes):
                return True
            time.sleep(0.05)
        return False

    def read(self) -> tuple[dict[int, tuple[float, float]], float]:
        """By step its milliseconds and loss; and the peak of allocated memory in
        MiB."""
        return read(self.text())


def read(text: str) -> tuple[dict[int, tuple[float, float]], float]:
    """Of a log by step its milliseconds and loss; and the peak of allocated memory in
    MiB.

    Megatron's second line has the means of the first two steps.
    """
    line = r"iteration +(\d+)/.*?iteration \(ms\): (\S+) .*?lm loss: (\S+)"
    found = [(int(n), float(ms), float(loss)) for n, ms, loss in re.findall(line, text)]
    if len(found) > 1:
        (_, first_ms, first_loss), (second, mean_ms, mean_loss) = found[:2]
        found[1] = (
            second,
            round(2 * mean_ms - first_ms, 1),
            round(2 * mean_loss - first_loss, 6),
        )
    peaks = re.findall(r"max allocated: ([\d.]+)", text)
    return {n: (ms, loss) for n, ms, loss in found}, max(map(float, peaks), default=0.0)


def environment(clone: Path, called: str) -> dict[str, Any]:
    """GPU and versions, asked for in a process of its own, which alone opens the GPU;
    and the date."""
    asked = (
        "import json; from lib.measure import environment; "
        "print(json.dumps(environment()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=ROOT / "benchmarks",
        capture_output=True,
        text=True,
        check=True,
    )
    commit = subprocess.run(
        ["git", "-C", str(clone), "log", "-1", "--format=%h"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    found = json.loads(done.stdout.splitlines()[-1])
    found["megatron-lm"] = called or commit
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"environment": found, "date": today}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def spread(times: list[float]) -> dict[str, float]:
    """Of the steps after warm-up: a fifth of them, in which kernels compile and graphs
    are made."""
    kept = sorted(times[len(times) // 5 :])
    return {
        "median": statistics.median(kept),
        "least": kept[0],
        "p10": kept[len(kept) // 10],
        "p90": kept[-1 - len(kept) // 10],
        "n": len(kept),
    }


def times_and_losses(launch: Launch) -> dict[str, Any]:
    """What a record has of a launch: times of its steps, peak memory, losses by
    step."""
    steps, peak = launch.read()
    if not steps:
        return {}
    return {
        "step_ms": spread([ms for ms, _ in steps.values()]),
        "first_ms": [ms for ms, _ in steps.values()][:2],
        "peak": peak,
        "losses": {step: loss for step, (_, loss) in steps.items()},
    }


if __name__ == "__main__":
    hold(sys.argv[2], sys.argv[3:])
