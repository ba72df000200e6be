"""The way of a steady forward stays short in every scheme, and a training step sends
what its layers need."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.spec_utils import build_module

import megatron_gdn
from megatron_gdn.specs import gated_delta_net_spec, hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.parallel import hybrid_model, make_config, model_config
from tests.ranks import on_ranks

TOKENS = 128
LENGTHS = (32, 32, 64)
# Files and functions of the plain rule's and front's arithmetic, in which a GPU has no
# part.
ARITHMETIC = (
    "ops/conv.py",
    "ops/elementwise.py",
    "ops/switches.py",
    "ops/front/plain.py",
    "ops/front/gates.py",
    "ops/front/table.py:Front.gates_of",
    "ops/rules/token_rule.py",
    "ops/delta_rule/chunk_math",
    "ops/delta_rule/plain.py",
    "ops/delta_rule/triangular.py",
    "ops/delta_rule/base.py",
    "ops/rules/chunk_table.py",
    "ops/state_maps/state_map.py",
    "ops/readout/base.py",
    "ops/layout.py",
    "ops/autograd.py",
)
# What stands in for CUDA is left out, too.
LEFT_OUT = (*ARITHMETIC, "compat/one_process.py")
# Calls and files, measured plus a few. Who passes a bound has put work into every
# forward of every layer.
MOST = {
    (1, "auto", False): (40, 12),
    (1, "decode", False): (35, 12),
    (1, "auto", True): (48, 15),
    (2, "headwise", False): (67, 19),
    (2, "chunkwise", False): (59, 18),
}
COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all_single",
    "all_gather",
    "batch_isend_irecv",
    "broadcast",
)


def folder_of(package) -> str:
    return os.path.dirname(package.__file__) + os.sep


OURS = folder_of(megatron_gdn)
MEGATRONS = folder_of(megatron.core)


def profiled(run: Callable, look: Callable) -> None:
    """Runs it; ``look`` is called as Python enters and leaves functions."""
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)


def entries_of(run: Callable) -> Counter[str]:
    """Entries of the package's functions (a generator enters once per step), by
    ``file:function``, without the arithmetic of the plain twins."""
    entries = Counter()

    def look(frame, event, _):
        code = frame.f_code
        file = code.co_filename.removeprefix(OURS)
        name = f"{file}:{code.co_qualname}"
        inside = file != code.co_filename
        if event == "call" and inside and not name.startswith(LEFT_OUT):
            entries[name] += 1

    profiled(run, look)
    return entries


def collectives_of(run: Callable) -> Counter[str]:
    """Collectives by the file of this package that asks for them; not those that
    Megatron's own functions ask for."""
    found = Counter()

    def look(frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_name not in COLLECTIVES:
            return
        if code.co_filename.endswith("distributed_c10d.py"):
            asking = frame.f_back
            while asking and not file_of(asking).startswith((OURS, MEGATRONS)):
                asking = asking.f_back
            if asking and file_of(asking).startswith(OURS):
                found[file_of(asking).removeprefix(OURS)] += 1

    profiled(run, look)
    return found


def file_of(frame) -> str:
    return frame.f_code.co_filename


def steady_forward(cp: int, mode: str, packed: bool) -> Counter[str]:
    """Of the second of two layers, which have seen this micro-batch's shape before."""
    config = make_config(context_parallel_size=cp)
    options = {"backend": "reference", "linear_cp_mode": mode}
    spec = gated_delta_net_spec("local", **options)
    first, later = (build_module(spec, config, layer_number=n) for n in (1, 2))
    params = thd(LENGTHS) if packed else None
    x = torch.randn(TOKENS // cp, 1, config.hidden_size, requires_grad=True)
    for _ in range(2):
        y, _ = first(x, None, packed_seq_params=params)
        later(y, None, packed_seq_params=params)[0].sum().backward()
    y, _ = first(x, None, packed_seq_params=params)
    return entries_of(lambda: later(y, None, packed_seq_params=params))


@torch.inference_mode()
def steady_step() -> Counter[str]:
    """Of a token of two sequences in Megatron's static context."""
    config = make_config()
    spec = gated_delta_net_spec("local", backend="reference")
    layer: Any = build_module(spec, config, layer_number=1)
    layer.eval()
    context = StaticInferenceContext(2, TOKENS)

    def feed(tokens: int) -> None:
        layer(torch.randn(tokens, 2, config.hidden_size), inference_context=context)
        context.increment_sequence_len_offset(tokens)

    for tokens in (8, 1, 1):
        feed(tokens)
    return entries_of(lambda: feed(1))


@pytest.mark.parametrize(("cp", "mode", "packed"), MOST, ids=str)
@on_ranks(cp="cp")
def test_a_steady_forward_calls_few_functions(cp, mode, packed):
    entries = steady_step() if mode == "decode" else steady_forward(cp, mode, packed)
    calls, most_files = MOST[cp, mode, packed]
    files = {name.partition(":")[0] for name in entries}
    assert 0 < sum(entries.values()) <= calls, entries
    assert len(files) <= most_files, entries
    checks = {"mixers/arguments.py"} | (set() if packed else {"mixers/packing.py"})
    assert not checks & files, "nothing to look at was given"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "messages"), [("headwise", 4), ("chunkwise", 6)])
@on_ranks(tp=2, cp=2)
def test_a_step_sends_what_each_layer_needs_and_is_checked_once(mode, messages):
    """Forward and backward of two layers."""
    config = model_config(
        "GG",
        hidden_size=32,
        add_bias_linear=True,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        sequence_parallel=True,
    )
    spec = hybrid_stack_spec("local", linear_cp_mode=mode, backend="reference")
    model = hybrid_model(config, "GG", spec, max_sequence_length=TOKENS)
    tokens = torch.arange(TOKENS // 2)[None] % 32

    def step() -> None:
        model(tokens, tokens, None, labels=tokens).sum().backward()

    step()
    found = collectives_of(step)
    checks = found.pop("context_parallel/agreement.py")
    assert checks == 1
    assert {file.split("/")[1] for file in found} == {mode}, found
    assert found.total() == 2 * messages
