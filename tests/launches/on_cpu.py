"""Run a script of a Megatron-LM clone on the CPU, behind torchrun:
tests/launches/on_cpu.py [megatron_gdn.launch] MEGATRON_LM/pretrain_hybrid.py FLAGS,
which end with `WITHOUT_GPU`."""

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import types
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.fsdp_on_cpu import (
    MeshOfCPUs,
    fill_states_of_empty_shards,
    one_collective_at_a_time,
)
from tests.ranks import write_in_this_process

WITHOUT_GPU = """
    --distributed-backend gloo --transformer-impl local
    --no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion
    --cp-comm-type all_gather
"""
# What a run imports after it has read its arguments, but the module that `--spec`
# names.
IMPORTED_BY_A_RUN = (
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.core.models.mimo",
    "megatron.core.datasets.helpers",
    "megatron_gdn.gdn.layer",
    "megatron_gdn.gdn2.layer",
    "megatron_gdn.gdp.layer",
    "megatron_gdn.kda.layer",
    "megatron_gdn.mamba2.layer",
    "megatron_gdn.mixers.attention",
)


class MakeOnCPU(TorchFunctionMode):
    """What is asked for on a GPU, or moved there by ``.cuda()`` or ``.to()``, stays on
    a CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.device and "cuda" in str(args[0]):
            args = ("cpu",)
        if func is torch.Tensor.to:
            args = (
                args[0],
                *("cpu" if "cuda" in str(value) else value for value in args[1:]),
            )
        return func(*args, **kwargs)


def answer_for_a_gpu() -> None:
    """What the training loop asks of ``torch.cuda``: devices to count, a Hopper,
    streams."""
    hopper = SimpleNamespace(name="CPU", major=9, minor=0, total_memory=80 * 2**30)
    torch.cuda.device_count = lambda: 8
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device=None: hopper
    of_run_megatron_on_cpu = type(torch.cuda.current_stream())

    class Stream(of_run_megatron_on_cpu):
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    torch.cuda.Stream = Stream
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False


def shard_on_cpus() -> None:
    """Meshes are of CPUs, gloo's collectives run in turn, and Adam has a state of every
    shard."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp2
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    vars(fsdp2)["DeviceMesh"] = vars(mcore_fsdp_adapter)["DeviceMesh"] = MeshOfCPUs
    param_and_grad_buffer._coalescing_manager = one_collective_at_a_time(
        param_and_grad_buffer._coalescing_manager
    )
    stored = DistributedOptimizer.sharded_param_state_fsdp_dtensor

    def with_every_state(self, is_loading: bool = False) -> Any:
        fill_states_of_empty_shards(self.optimizer)
        return stored(self, is_loading)

    DistributedOptimizer.sharded_param_state_fsdp_dtensor = with_every_state


def take_compiled_helpers_of_the_wheel() -> None:
    """The wheel has the C++ index builder, which a clone compiles into its own
    folder."""
    from megatron.core import datasets
    from megatron.core.datasets import utils

    found = importlib.metadata.distributions(name="megatron-core")
    datasets.__path__ += [
        str(one.locate_file("megatron/core/datasets")) for one in found
    ]
    utils.compile_helpers = lambda: None


def read_json_lines_for_datasets() -> None:
    """``--sft`` reads its lines through the package ``datasets``; here, unless it is
    installed."""
    if importlib.util.find_spec("datasets"):
        return
    module: Any = types.ModuleType("datasets")

    def load_dataset(kind: str, data_files: str, split: str) -> list[Any]:
        return [json.loads(line) for line in Path(data_files).read_text().splitlines()]

    module.load_dataset = load_dataset
    sys.modules["datasets"] = module


def cut_documents_without_transformer_engine() -> None:
    """``--sft`` asks Transformer Engine which tokens of packed documents a rank gets
    (zigzag)."""
    from megatron.core import utils

    from megatron_gdn.context_parallel import local_indices

    def indices(
        offsets: torch.Tensor, tokens: int, ranks: int, rank: int
    ) -> torch.Tensor:
        return local_indices(offsets.diff().tolist(), ranks, rank)

    utils.tex = SimpleNamespace(thd_get_partitioned_indices=indices)


def count_experts_tokens_in_numbers() -> None:
    """The sizes of an exchange between experts leave the GPU as arrays of numpy."""
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved


def predict_tokens_without_transformer_engine() -> None:
    """Megatron-LM asks for a class of Transformer Engine, which is none without it."""
    from megatron.core.transformer import multi_token_prediction

    vars(multi_token_prediction)["is_inference_column_parallel_linear"] = (
        lambda module: False
    )


def prepare(clone: Path) -> None:
    """All stand-ins; what a script imports comes from its clone."""
    sys.path.insert(0, str(clone))
    from megatron_gdn.compat.one_process import run_megatron_on_cpu

    run_megatron_on_cpu()
    answer_for_a_gpu()
    shard_on_cpus()
    take_compiled_helpers_of_the_wheel()
    read_json_lines_for_datasets()
    predict_tokens_without_transformer_engine()
    cut_documents_without_transformer_engine()
    count_experts_tokens_in_numbers()
    from megatron.training import training

    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    # Megatron's small fusions: minutes of a C++ compiler
    torch.compiler.set_stance("force_eager")


def run(script: str, *flags: str) -> None:
    """As ``python script *flags`` does, or behind ``-m megatron_gdn.launch`` if that is
    first."""
    with MakeOnCPU():
        if script == "megatron_gdn.launch":
            from megatron_gdn import launch

            launch.main([*flags])
        else:
            sys.argv = [script, *flags]
            runpy.run_path(script, run_name="__main__")


def be_rank(rank: int, port: int, asked: dict[str, Any]) -> None:
    """One process of a launch, with the environment that torchrun gives it."""
    os.setpgrp()
    environment = asked["environment"] | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(asked["processes"]),
        "LOCAL_WORLD_SIZE": str(asked["processes"]),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    for stream, kind in ((1, "out"), (2, "err")):
        file = f"{asked['log']}.{kind}"
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
    if "--async-save" not in asked["arguments"]:
        write_in_this_process()
    run(*asked["arguments"])


def code_of(ranks: list[Any], seconds: float) -> int:
    """Of the first that fails, which ends the others soon; -1 if they did not end in
    time."""
    code = 0
    deadline = time.monotonic() + seconds
    running = {rank.sentinel: rank for rank in ranks}
    while running and (left := deadline - time.monotonic()) > 0:
        for ended in wait(list(running), left):
            rank = running.pop(ended)
            rank.join()
            if rank.exitcode and not code:
                code = rank.exitcode
                deadline = time.monotonic() + 2
    for rank in running.values():
        os.killpg(rank.pid, signal.SIGKILL)
        rank.join()
    return code or -bool(running)


def read_docstrings_once() -> None:
    """Megatron's parser takes help from the source of its config classes, at every
    parse."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read = ArgumentGroupFactory._get_field_docstrings.__get__(
        object.__new__(ArgumentGroupFactory)
    )
    ArgumentGroupFactory._get_field_docstrings = staticmethod(functools.cache(read))
    add_megatron_arguments(argparse.ArgumentParser())


def serve(clone: Path) -> None:
    """Forks a launch per line of stdin and answers with its code.

    Ranks have imported what the scripts of the clone import and our layers, not what
    ``--spec`` names, and started no thread; only what is saved beside the training has
    writers of its own, which import it all again. A rank ends without Python's
    clean-up, which copies all it imported.
    """
    answers = open(os.dup(1), "w", buffering=1)  # noqa: SIM115
    os.dup2(2, 1)
    prepare(clone)
    with MakeOnCPU():
        for script in ("pretrain_gpt.py", "pretrain_hybrid.py"):
            runpy.run_path(str(clone / script), run_name="imported")
    for module in IMPORTED_BY_A_RUN:
        importlib.import_module(module)
    read_docstrings_once()
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
        processes = range(asked["processes"])
        ranks = [
            context.Process(target=be_rank, args=(rank, port, asked))
            for rank in processes
        ]
        for rank in ranks:
            rank.start()
        print(code_of(ranks, asked["seconds"]), file=answers)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "serve":
        serve(Path(arguments[1]))
    else:
        prepare(Path(arguments[arguments[0] == "megatron_gdn.launch"]).resolve().parent)
        run(*arguments)
