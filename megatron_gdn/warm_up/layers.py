"""Runs the layer on a simulated GPU and records a task for each kernel that the layer
launches.

The layer, FlashQLA and torch then choose kernels as in a run. A rank of a run can make
the following calls of the layer, grouped by how they use FlashQLA (option ``--uses``):

cut        one long sequence, and long documents, which FlashQLA cuts into segments that
           run in parallel
rows       a batch of several rows
uncut      one or several sequences that are too short to be cut
states     pieces of sequences with their states, as in chunkwise context parallelism
whole      sequences in ``config.batch_invariant_mode``
recompute  the calls of cut, rows and uncut with ``recompute="full"``, whose backward
           runs the forward a second time
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ..command_line import MOST_HEADS, MOST_RANKS, parse_whole_number
from ..context_parallel import agreement
from ..gdn.flash_qla.builds import USUAL_USES, Heads, expected_heads
from ..gdn.sizes import GDNDims
from .absent_gpu import without_computing
from .tasks import Task, recorded_kernels

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# lengths of sequences in tokens; FlashQLA cuts those of _LONG_LENGTH into segments
_SHORT_LENGTH = 208
_LONG_LENGTH = 9216
# The tokens of a rank are a multiple of this number, as in most runs. Triton compiles a
# separate variant for integers that are multiples of 16.
_LENGTH_MULTIPLE = 16
# FlashQLA chooses one of three forward kernels by the quotient
# sequences * heads / multiprocessors. The first kernel runs if the quotient is at least
# this number, the second if it is at least half of this number, else the third.
_FULL_GPU_SHARE = 0.7
# fields of `GDNDims`; with "linear_" before each, fields of Megatron's config
_SIZE_NAMES = (
    "num_key_heads",
    "num_value_heads",
    "key_head_dim",
    "value_head_dim",
    "conv_kernel_dim",
)
_HIDDEN_SIZE = 64  # no kernel depends on the hidden size


class LayerSizes(NamedTuple):
    """The sizes of the layer on all ranks together, and the parallel sizes of the
    run."""

    dims: GDNDims
    tp: int = 1
    cp: int = 1


def sizes_from_options(arguments: argparse.Namespace) -> LayerSizes:
    """The sizes that the options of the command give; ``--tp`` and ``--cp`` override
    those in the file of ``--config``."""
    if arguments.config is None:
        # All published models have heads of 128 dims and convolutions of 4 taps.
        sizes = dict(zip(_SIZE_NAMES, (*arguments.heads, 128, 128, 4), strict=True))
        sizes = LayerSizes(GDNDims(hidden_size=_HIDDEN_SIZE, **sizes))
    else:
        sizes = read_sizes(arguments.config)
    return LayerSizes(sizes.dims, arguments.tp or sizes.tp, arguments.cp or sizes.cp)


def read_sizes(path: str | Path) -> LayerSizes:
    """Read the sizes from ``config.json``, a folder with this file, a launch script
    (``--linear-num-key-heads 16``) or Megatron's YAML
    (``linear_num_key_heads: 16``)."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give config.json, a Hugging Face model folder, a "
            "launch script or a YAML file."
        )
    text = path.read_text(errors="replace")

    def number_after(argument: str, most: int) -> int | None:
        """The number from 1 to ``most`` after the name ``argument`` in the file; None
        if the file does not have the name. Words of the name are joined by - or _."""
        words = r"[-_]".join(argument.split("_"))
        # Successive spaces match one pattern only. Two neighbouring patterns for spaces
        # would take time that grows with the square of the number of spaces.
        separated = r"(?:\s*[:=]\s*|\s+)"
        found = set(re.findall(rf"(?<![\w]){words}[\"']?{separated}([0-9]+)\b", text))
        if len(found) > 1:
            said = " and as ".join(f"{number:.20}" for number in sorted(found)[:3])
            raise ValueError(f"{path} gives {argument} as {said}; keep one.")
        if not found:
            return None
        try:
            return parse_whole_number(found.pop(), most)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{path} gives {argument}, and {error}.") from None

    sizes = {}
    missing = []
    for name in _SIZE_NAMES:
        size = number_after(f"linear_{name}", MOST_HEADS)
        if size is None:
            missing.append(f"linear_{name}")
        else:
            sizes[name] = size
    if missing:
        raise ValueError(
            f"{path} does not name {', '.join(missing)}; add them, or give --heads and "
            "the other sizes on the command line."
        )
    kinds = "tensor_model", "context"
    tp, cp = (number_after(f"{kind}_parallel_size", MOST_RANKS) or 1 for kind in kinds)
    return LayerSizes(GDNDims(hidden_size=_HIDDEN_SIZE, **sizes), tp, cp)


class LayerCall(NamedTuple):
    """One forward and backward of a layer on one rank."""

    use: str  # a value of ``--uses``
    cp: int  # context-parallel ranks
    tokens: int  # tokens of a batch row, of all ranks together
    rows: int  # batch rows
    # number of equally long documents in the row; None: not packed
    documents: int | None
    layout: str  # the sequence layout


def layer_calls(
    sizes: LayerSizes, mode: str, uses: list[str] | None, multiprocessors: int
) -> list[LayerCall]:
    """List the calls that a rank of the run may make; ``mode`` is ``linear_cp_mode``.

    ``uses``: values of the option ``--uses``; None: the usual ones.
    ``multiprocessors``: the number of the GPU's multiprocessors. In mode "auto" the
    layer picks a mode for each micro-batch, so the list has the calls of both modes.
    Raises a ValueError if the ranks cannot share the heads.
    """
    local = sizes.dims.shard(sizes.tp)
    headwise_ranks = 1  # the ranks that share the heads
    if sizes.cp > 1 and mode != "chunkwise":
        try:
            local.layout.share(sizes.cp)
            headwise_ranks = sizes.cp
        except ValueError:  # "auto" takes chunkwise if cp does not divide the heads
            if mode == "headwise":
                raise
    usual = USUAL_USES
    if sizes.cp > 1 and mode != "headwise":
        usual = usual + ("states",)
    found: list[LayerCall] = []

    def add_call(
        use: str, tokens: int, rows: int = 1, documents: int | None = None
    ) -> None:
        """Add a call of ``use`` to ``found``; ``tokens`` are those of one row, of all
        ranks together."""
        cp = headwise_ranks
        tokens = _rounded_up(tokens, cp * (documents or 1))
        found.append(LayerCall(use, cp, tokens, rows, documents, "zigzag"))

    def add_pieces(count: int) -> None:
        """Add a call of "states" to ``found``, in which each rank has ``count`` pieces
        of _SHORT_LENGTH tokens together."""
        # Without context parallelism, compile as for two ranks.
        cp = max(sizes.cp, 2)
        # In contiguous a rank has one piece of a document, in zigzag two.
        layout = "contiguous" if count == 1 else "zigzag"
        # Rounded up: with one piece less FlashQLA might take another kernel.
        documents = math.ceil(count / 2)
        tokens = _rounded_up(_SHORT_LENGTH * cp, cp * documents)
        found.append(LayerCall("states", cp, tokens, 1, documents, layout))

    for use in uses or usual:
        heads = local.num_value_heads
        if use != "states":
            heads = heads // headwise_ranks
        # the numbers of sequences for which FlashQLA takes each of its three kernels
        full = math.ceil(_FULL_GPU_SHARE * multiprocessors)
        counts = sorted({1, math.ceil(full / 2 / heads), math.ceil(full / heads)})
        if use in ("cut", "recompute"):
            add_call(use, _LONG_LENGTH)
            add_call(use, _LONG_LENGTH, documents=3)
        for count in counts:
            if use in ("rows", "recompute"):
                add_call(use, _SHORT_LENGTH, rows=max(2, count))
            if use in ("uncut", "recompute"):
                add_call(use, _SHORT_LENGTH, documents=count)
            if use == "states":
                add_pieces(count)
            if use == "whole":
                add_call(use, _LONG_LENGTH, documents=count)
    return found


def _rounded_up(tokens: int, parts: int) -> int:
    """``tokens``, rounded up so that each of ``parts`` equal parts has a multiple of
    _LENGTH_MULTIPLE tokens.

    Every document, or every row, gives each rank an equal part.
    """
    multiple = _LENGTH_MULTIPLE * parts
    return -(-tokens // multiple) * multiple


def tasks_of(
    sizes: LayerSizes, arguments: argparse.Namespace
) -> tuple[list[Task], set[Heads]]:
    """Return a task for each variant of a kernel, and the heads for which FlashQLA is
    compiled.

    Must run in `simulated_hopper`. FlashQLA's kernels take longest to compile, so their
    tasks come first.
    """
    # `run_tasks` later runs each task in a fork of this process. A fork has only the
    # thread that forks, so work that torch gives to other threads would never end.
    torch.set_num_threads(1)
    if "flash_qla" in arguments.kernels:
        backend = "flash_qla"
    else:
        backend = "auto"
    calls = layer_calls(
        sizes, arguments.linear_cp_mode, arguments.uses, arguments.multiprocessors
    )
    compiled_heads: set[Heads] = set()
    with recorded_kernels() as recorded, without_computing():
        for call in calls:
            run_layer(sizes, call, rule_operands=arguments.operands, backend=backend)
            if backend == "flash_qla":
                # the layer's rule has set these heads by `set_next_calls`
                compiled_heads.add(expected_heads())

    tasks = [task for task in recorded.values() if task.kind in arguments.kernels]
    return sorted(tasks, key=lambda task: task.kind != "flash_qla"), compiled_heads


def run_layer(sizes: LayerSizes, call: LayerCall, **options: object) -> None:
    """Run the layer forward and backward as one of the call's ranks; nothing is sent.

    A call outside of `simulated_hopper` and `without_computing` would compute on a real
    GPU.

    Args:
        sizes: the sizes of the layer on all ranks together.
        call: the tokens, documents and ranks of the forward.
        options: keyword arguments of the GatedDeltaNet constructor.
    """
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ..specs import gated_delta_net_spec

    dims = sizes.dims
    tp = sizes.tp
    cp = call.cp
    config = TransformerConfig(
        num_layers=1,
        hidden_size=dims.hidden_size,
        num_attention_heads=tp,
        bf16=True,
        params_dtype=torch.bfloat16,
        normalization="RMSNorm",
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        linear_num_key_heads=dims.num_key_heads,
        linear_num_value_heads=dims.num_value_heads,
        linear_key_head_dim=dims.key_head_dim,
        linear_value_head_dim=dims.value_head_dim,
        linear_conv_kernel_dim=dims.conv_kernel_dim,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    # Set only after the constructor, which would otherwise require FlashAttention. The
    # layer does not use FlashAttention.
    config.batch_invariant_mode = call.use == "whole"
    if call.use == "recompute":
        options["recompute"] = "full"
    if cp > 1:
        if call.use == "states":
            mode = "chunkwise"
        else:
            mode = "headwise"
        options |= {"linear_cp_mode": mode, "cp_layout": call.layout}
    with _fake_groups(tp, cp) as groups:
        spec = gated_delta_net_spec("local", **options)
        layer: Any = build_module(spec, config, layer_number=1, pg_collection=groups)
        layer = layer.to("cuda")
        shape = call.tokens // cp, call.rows, dims.hidden_size
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        packed = None
        if call.documents is not None:
            length = call.tokens // call.documents
            offsets = torch.arange(
                0, call.tokens + 1, length, dtype=torch.int32, device="cpu"
            )
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=offsets,
                cu_seqlens_kv=offsets,
                max_seqlen_q=call.tokens,
                max_seqlen_kv=call.tokens,
            )
        out: Tensor = layer(x, None, packed_seq_params=packed)[0]
        out.backward(torch.zeros_like(out))


@contextmanager
def _fake_groups(tp: int, cp: int) -> Iterator[ProcessGroupCollection]:
    """In this context torch.distributed runs as rank 0 of ``tp * cp`` ranks; the other
    ranks do not exist. Yields the process groups ``tp`` and ``cp``.

    torch's backend "fake" sends nothing and returns at once.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Other ranks do not exist and send nothing, so ranks cannot compare micro-batches.
    no_comparison = patch.object(agreement, "_all_ranks_compare", lambda *_: False)
    one_machine = patch.object(
        agreement, "_hosts", lambda group, *_: [0] * group.size()
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp * cp)
    groups: Any = ProcessGroupCollection()
    groups.tp = dist.new_group(list(range(tp)), backend="fake")
    groups.cp = dist.new_group(list(range(0, tp * cp, tp)), backend="fake")
    try:
        with no_comparison, one_machine:
            yield groups
    finally:
        dist.destroy_process_group()
