"""What a run needs compiled: the heads of its ranks, and their kernels as tasks.

FlashQLA's: the rule is called as a layer calls it, but FlashQLA's kernels are only noted. So
FlashQLA itself decides which kernels a call takes.

    cut      a sequence cut into parts that run side by side; all sequences in deterministic mode
    rows     a batch of whole rows
    uncut    sequences too short to be cut, one and several
    states   states in and out, as in context parallelism
    whole    whole sequences from state to state, as in ``config.batch_invariant_mode``
    again    a second run of the forward in the backward, of all of these (``recompute="full"``)

Triton's: the launches of :mod:`.mixer_kernels`. fla tunes its kernels by timing them, so they run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from ..gdn.flash_qla.builds import ON_REQUEST, PARTS, Heads
from ..gdn.flash_qla.plan import stages
from ..gdn.flash_qla.rule import FlashQlaRule
from ..gdn.rule import resolve_rule
from ..gdn.sizes import GDNDims
from ..ops.delta_rule.base import HeadSizes, RuleInputs
from ..ops.documents import Documents
from ..ops.rules.base import Bits
from .hopper import Task, flash_qla_noted, stand_in_for_hopper

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Share(NamedTuple):
    """Heads that one rank runs."""

    key_heads: int
    value_heads: int
    states: bool  # the rule also takes and returns states, as chunkwise context parallelism asks


class Needs(NamedTuple):
    """The layer of one rank."""

    shares: list[Share]  # one for each way in which the run may split the heads
    sizes: HeadSizes  # the head dims; its numbers of heads are not used
    taps: int  # of the convolution
    flash_qla: dict[Heads, tuple[str, ...]]  # what FlashQLA is compiled for, each with the parts


def shares_of(dims: GDNDims, tp: int = 1, cp: int = 1, mode: str = "auto") -> list[Share]:
    """What a rank of a run with these parallel sizes may have to run.

    ``mode`` is ``linear_cp_mode``; "auto" picks per micro-batch, so both ways are listed.
    """
    local, found = dims.shard(tp), []
    if cp == 1 or mode != "chunkwise":
        try:
            part = local.share_heads(cp)
            found.append(Share(part.num_key_heads, part.num_value_heads, False))
        except ValueError:  # "auto" then passes states
            if mode == "headwise":
                raise
    if cp > 1 and mode != "headwise":
        found.append(Share(local.num_key_heads, local.num_value_heads, True))
    return found


def needs_of(arguments: argparse.Namespace) -> Needs:
    """From the command line."""
    if arguments.config is not None:
        for flag, size in (("head-dim", arguments.head_dim), ("conv", arguments.conv)):
            if size is not None:
                raise ValueError(f"--{flag} beside --config, which names this size; leave it out.")
        models = [read_model(arguments.config)]
    else:
        dim, taps = arguments.head_dim or 128, arguments.conv or 4
        models = [
            Model(
                GDNDims(
                    hidden_size=1, num_key_heads=key_heads, num_value_heads=value_heads,
                    key_head_dim=dim, value_head_dim=dim, conv_kernel_dim=taps,
                )
            )
            for key_heads, value_heads in arguments.heads
        ]  # fmt: skip
    shares: dict[Share, None] = {}
    for dims, tp, cp in models:
        tp, cp = arguments.tp or tp or 1, arguments.cp or cp or 1
        shares |= dict.fromkeys(shares_of(dims, tp, cp, arguments.linear_cp_mode))
    flash_qla: dict[Heads, tuple[str, ...]] = {}
    for operands in arguments.operands if "flash_qla" in arguments.kernels else ():
        for key, value, states in shares:
            asked = ("states",) if states else ()
            parts = arguments.parts or [p for p in PARTS if p not in ON_REQUEST or p in asked]
            heads = Heads(key, value, _DTYPES[operands])
            flash_qla[heads] = tuple(dict.fromkeys((*flash_qla.get(heads, ()), *parts)))
    dims = models[0].dims
    sizes = HeadSizes(1, 1, dims.key_head_dim, dims.value_head_dim)
    return Needs(list(shares), sizes, dims.conv_kernel_dim, flash_qla)


_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


class Model(NamedTuple):
    """Sizes of the layer, and the parallel sizes that a file names."""

    dims: GDNDims
    tp: int | None = None
    cp: int | None = None


def read_model(path: str | Path) -> Model:
    """Read the sizes from ``config.json``, a folder that has one, or any text that names Megatron's
    arguments, such as a launch script (``--linear-num-key-heads 16``) or YAML
    (``linear_num_key_heads: 16``)."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give config.json, a Hugging Face model folder, a launch "
            f"script or a YAML file."
        )
    text = path.read_text()
    if path.suffix == ".json":
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}.") from error
        # Vision-language models keep the sizes in a section of their own.
        text = json.dumps(found.get("text_config") or found, indent=1)

    def named(argument: str) -> int | None:
        """The number after the argument's name, with - or _ between its words."""
        words = r"[-_]".join(argument.split("_"))
        found = set(re.findall(rf"(?<![\w]){words}[\"']?\s*[:=\s]\s*(\d+)\b", text))
        if len(found) > 1:
            said = " and as ".join(sorted(found))
            raise ValueError(f"{path} gives {argument} as {said}; keep one.")
        return int(found.pop()) if found else None

    sizes = {name: named(f"linear_{name}") for name in _SIZES}
    if missing := [f"linear_{name}" for name, size in sizes.items() if size is None]:
        raise ValueError(
            f"{path} does not name {', '.join(missing)}; add them, or give --heads and the "
            f"other sizes on the command line."
        )
    hidden = named("hidden_size") or 1  # no kernel depends on it
    known = {name: size for name, size in sizes.items() if size is not None}
    of_run = (named(f"{kind}_parallel_size") for kind in ("tensor_model", "context"))
    return Model(GDNDims(hidden_size=hidden, **known), *of_run)


def tasks_of(needs: Needs, arguments: argparse.Namespace) -> list[Task]:
    """One task per kernel of FlashQLA, and per launch of the Triton kernels."""
    torch.set_num_threads(1)  # a fork of this process would lack its threads
    tasks: list[Task] = []
    for heads, parts in needs.flash_qla.items():
        why = FlashQlaRule().why_not_heads(heads.value)
        if (dims := needs.sizes[2:]) != (_HEAD_DIM, _HEAD_DIM):
            why = f"flash_qla takes head dims of {_HEAD_DIM}, not {dims[0]} and {dims[1]}"
        if why is not None:
            raise ValueError(f"{why}; this layer runs on fla. Give --kernels triton fla.")
        tasks += flash_qla_tasks(heads, parts, arguments.multiprocessors)
    if "triton" in arguments.kernels:
        from .mixer_kernels import mixer_tasks

        for operands in dict.fromkeys(arguments.operands):
            for key, value in dict.fromkeys(share[:2] for share in needs.shares):
                local = needs.sizes._replace(key_heads=key, value_heads=value)
                tasks += mixer_tasks(local, needs.taps, _DTYPES[operands])
    return sorted(tasks, key=lambda task: not task.soon)


_HEAD_DIM = 128
_SHORT, _LONG = 200, 9000  # tokens; the second is cut
# Tokens of a part's call, and whether they are packed documents.
_CALLS = {
    "cut": (_LONG, False), "rows": (_SHORT, False), "uncut": (_SHORT, True),
    "states": (_SHORT, True), "whole": (_LONG, True),
}  # fmt: skip
# The forward has three kernels, chosen by sequences * heads: at least this share of the GPU's
# multiprocessors, at least half of that, and fewer.
_FULL = 0.7
# The slowest kernels to compile, slowest first; they begin in this order.
_SLOW = ("fused_chunk_gdr_bwd", "fused_chunk_gdr_fwd", "prepare_dh", "prepare_h", "kkt_solve")


def flash_qla_tasks(heads: Heads, parts: tuple[str, ...], multiprocessors: int) -> list[Task]:
    """Every kernel that these parts of FlashQLA take for these heads, once; the first part first.

    This process compiles for Hopper from here on and cannot use a GPU.
    """
    missing = [name for name in ("flash_qla", "tilelang") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"FlashQLA's kernels cannot be compiled without {' and '.join(missing)}; install "
            f"flash-qla 0.1.3, or give --kernels triton."
        )
    stand_in_for_hopper(multiprocessors)
    stages()  # puts the fences in, before the kernels are noted
    full, first = math.ceil(_FULL * multiprocessors), 0
    counts = sorted({1, math.ceil(full / 2 / heads.value), math.ceil(full / heads.value)})
    with flash_qla_noted(str(heads)) as noted:
        for part in parts:
            for count in counts:
                for call in _CALLS if part == "again" else (part,):
                    _call_flash_qla(call, heads, count, again=part == "again")
            if part == parts[0]:
                first = len(noted)

    def slowness(task: Task) -> int:
        found = (at for at, name in enumerate(_SLOW) if task.name.startswith(name))
        return next(found, len(_SLOW))

    tasks = [task._replace(soon=at < first) for at, task in enumerate(noted.values())]
    return sorted(tasks, key=lambda task: (not task.soon, slowness(task)))


def _call_flash_qla(part: str, heads: Heads, count: int, again: bool) -> None:
    """Forward and backward of the rule, on zeros, for so many sequences."""
    rows = max(2, count) if part == "rows" else 1  # a single row counts as a sequence
    (tokens, packed), documents = _CALLS[part], None
    if packed:
        offsets = [n * tokens // count for n in range(count + 1)]
        documents = Documents.from_cu_seqlens(offsets, tokens, device="cpu")

    def zeros(*shape: int, dtype: torch.dtype = heads.dtype) -> torch.Tensor:
        return torch.zeros(rows, tokens, *shape, dtype=dtype)

    k, v = zeros(heads.key, _HEAD_DIM), zeros(heads.value, _HEAD_DIM)
    g, beta = (zeros(heads.value, dtype=torch.float32) for _ in range(2))
    rule = FlashQlaRule(Bits.ON_GRID if part == "whole" else Bits.FREE)
    inputs = RuleInputs(k, k, v, g, beta)
    begun, initial = rule.begin(inputs, documents), None
    if part == "states":
        initial = torch.zeros_like(begun.state_map().local)
    saved = begun.run(initial).saved
    if again:
        kept = rule.kept_to_run_again(saved)
        saved = rule.run_again(inputs, kept, documents, initial).saved
    backward = rule.begin_backward(v, inputs, saved, documents)
    if part == "states":
        backward.d_initial()
        backward.run(initial, initial)
    else:
        backward.run()
        rule.begin(inputs, documents).run(keep=False)
    if part == "cut":  # other documents may continue this one
        continued = rule.begin(inputs, documents).run(final=True)
        backward = rule.begin_backward(v, inputs, continued.saved, documents)
        backward.run(None, continued.final)


def tune_fla(needs: Needs) -> None:
    """fla's forward and backward, dense and packed, in bf16, on the GPU, for all heads.

    fla keeps its choices in Triton's cache (unless FLA_CACHE_RESULTS=0), per heads, dims and
    lengths.
    """
    if not torch.cuda.is_available():
        raise ValueError("fla's kernels are tuned on a GPU, and there is none here.")
    for share in needs.shares:
        sizes = needs.sizes._replace(key_heads=share.key_heads, value_heads=share.value_heads)
        for tokens in (8192, 2048):
            _run_fla(sizes, tokens)
        print(f"fla is tuned for {':'.join(map(str, sizes[:3]))}", flush=True)


def _run_fla(sizes: HeadSizes, tokens: int) -> None:
    rule = resolve_rule("fla", device="cuda", dtype=torch.bfloat16, sizes=sizes).rule

    def zeros(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or rule.operand_dtype or torch.bfloat16
        return torch.zeros(1, tokens, *shape, dtype=dtype, device="cuda")

    G, H, K, V = sizes
    gates = (zeros(H, dtype=torch.float32) for _ in range(2))
    inputs = RuleInputs(zeros(G, K), zeros(G, K), zeros(H, V), *gates)
    d_o = zeros(H, V, dtype=torch.bfloat16)
    packed = Documents.from_cu_seqlens([0, tokens // 3, tokens], tokens, device="cuda")
    for documents in (None, packed):
        saved = rule.begin(inputs, documents).run().saved
        rule.begin_backward(d_o, inputs, saved, documents).run()
    torch.cuda.synchronize()
