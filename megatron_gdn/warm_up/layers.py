"""The layer of a run, called on a GPU that is not there; what its calls launch becomes tasks.

So the layer, FlashQLA and torch themselves decide which kernels a call takes. fla tunes its kernels
by timing them, so for these the layer runs on a GPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ..context_parallel import agreement, machines
from ..gdn.flash_qla.builds import Heads, expected_heads
from .absent_gpu import nothing_computed
from .calls import Call, Model, calls_of
from .tasks import Task, kernels_noted

# The slowest kernels to compile, slowest first; they begin in this order.
_SLOW = ("fused_chunk_gdr_bwd", "fused_chunk_gdr_fwd", "prepare_dh", "prepare_h", "kkt_solve")


def tasks_of(
    models: list[Model], arguments: argparse.Namespace
) -> tuple[list[Task], dict[Heads, set[str]]]:
    """A task for each variant of a kernel, and the parts that FlashQLA's are for, by heads.

    Those of the first part come first.
    """
    torch.set_num_threads(1)  # a fork of this process would lack its threads
    count, backend = arguments.multiprocessors, "auto"
    if "flash_qla" in arguments.kernels:
        backend = "flash_qla"
    soon: list[Any] = []
    parts: dict[Heads, set[str]] = {}
    with kernels_noted() as noted, nothing_computed():
        for operands in dict.fromkeys(arguments.operands):
            for model in models:
                calls = calls_of(model, arguments.linear_cp_mode, arguments.parts, count)
                for call in calls:
                    run_layer(model, call, rule_operands=operands, backend=backend)
                    if call.part == calls[0].part:
                        soon = [*noted]
                    if backend == "flash_qla":
                        parts.setdefault(expected_heads(), set()).add(call.part)

    def order(key: Any) -> tuple[bool, int]:
        slow = (at for at, name in enumerate(_SLOW) if noted[key].name.startswith(name))
        return key not in soon, next(slow, len(_SLOW))

    tasks = [noted[key] for key in sorted(noted, key=order)]
    return [task for task in tasks if task.kind in arguments.kernels], parts


def tune_fla(models: list[Model], arguments: argparse.Namespace) -> None:
    """Forward and backward of the layer with fla's rule, on the GPU.

    fla keeps its choices in Triton's cache (unless FLA_CACHE_RESULTS=0), per heads, dims and
    lengths.
    """
    if not torch.cuda.is_available():
        raise ValueError("fla's kernels are tuned on a GPU, and there is none here.")
    for model in models:
        for call in calls_of(model, arguments.linear_cp_mode, ["cut", "rows", "uncut"], 1):
            run_layer(model, call, backend="fla")
        print(f"fla is tuned for {model.dims.num_key_heads}:{model.dims.num_value_heads} heads")
    torch.cuda.synchronize()


def run_layer(model: Model, call: Call, **options: Any) -> None:
    """Forward and backward of the layer on one of the call's ranks; messages are not sent."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ..specs import gated_delta_net_spec

    dims, (tp, cp) = model.dims, (call.tp, call.cp)
    config = TransformerConfig(
        num_layers=1, hidden_size=dims.hidden_size, num_attention_heads=tp, bf16=True,
        params_dtype=torch.bfloat16, normalization="RMSNorm", add_bias_linear=False,
        tensor_model_parallel_size=tp, context_parallel_size=cp,
        linear_num_key_heads=dims.num_key_heads, linear_num_value_heads=dims.num_value_heads,
        linear_key_head_dim=dims.key_head_dim, linear_value_head_dim=dims.value_head_dim,
        linear_conv_kernel_dim=dims.conv_kernel_dim, gradient_accumulation_fusion=False,
        use_cpu_initialization=True, perform_initialization=False,
        batch_invariant_mode=call.part == "whole",
    )  # fmt: skip
    if call.part == "again":
        options["recompute"] = "full"
    if cp > 1:
        options |= {"linear_cp_mode": call.mode, "cp_layout": call.layout}
    with _ranks(tp, cp) as groups:
        spec = gated_delta_net_spec("local", **options)
        layer: Any = build_module(spec, config, layer_number=1, pg_collection=groups)
        layer = layer.to("cuda")
        shape = call.tokens // cp, call.rows, dims.hidden_size
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        packed = None
        if call.offsets is not None:
            offsets = torch.tensor(call.offsets, dtype=torch.int32)
            packed = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets,
                max_seqlen_q=call.tokens, max_seqlen_kv=call.tokens,
            )  # fmt: skip
        out: Tensor = layer(x, None, packed_seq_params=packed)[0]
        out.backward(torch.zeros_like(out))
        with torch.no_grad():
            layer(x, None, packed_seq_params=packed)


@contextmanager
def _ranks(tp: int, cp: int) -> Iterator[Any]:
    """Groups of a rank among ``tp`` * ``cp`` whose other ranks are not there."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # What the others answer means nothing.
    nobody = patch.dict(os.environ, {agreement.SWITCH: "0"})
    one_machine = patch.object(machines, "_hosts", lambda group, *_: [0] * group.size())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp * cp)
    groups: Any = ProcessGroupCollection()
    groups.tp = dist.new_group([*range(tp)], backend="fake")
    groups.cp = dist.new_group([*range(0, tp * cp, tp)], backend="fake")
    try:
        with nobody, one_machine:
            yield groups
    finally:
        dist.destroy_process_group()
