"""Run on every rank: documents in fixed buffers against the same documents as they come."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gdn import SequenceLayout, set_documents, static_packed_seq_params
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.context_parallel.agreement import SWITCH
from megatron_gdn.mixers.packing import static_documents_of
from megatron_gdn.specs import gated_delta_net_spec
from tests.distributed.layer_laws import build_layer, randomise_, thd
from tests.host_reads import no_host_reads
from tests.parallel import group_of_one, make_config, parallel
from tests.whole_groups import whole_groups

TOKENS, MOST = 256, 8
SETS = (
    (256,),
    (128, 128),
    (8, 248),
    (0, 256, 0),
    (64, 64, 64, 64),
    (8, 16, 24, 32, 40, 136),
    (80, 0, 0, 0, 0, 80, 0, 96),
    (32,) * 8,
    (72, 184),
    (248, 8),
)


def everything(layer, x, weight, packed_seq_params) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    out, _ = layer(leaf, None, packed_seq_params=packed_seq_params)
    (out.float() * weight).sum().backward()
    found = {"output": out.detach(), "dx": leaf.grad}
    return found | {name: p.grad.clone() for name, p in layer.named_parameters()}


def addresses(documents) -> dict:
    """Of every tensor that is derived from the boundaries."""
    tables = {key: [x.data_ptr() for x in made] for key, (_, made) in documents._tables.items()}
    return {"plans": {key: id(plan) for key, plan in documents.plans.items()}, **tables}


def buffers_equal_ordinary_documents(cp: int = 1, layout: str = "zigzag", **changes) -> None:
    """Ten sets of documents at the same addresses, and the host reads nothing."""
    options = {"cp_layout": layout, **changes.pop("options", {})}
    with parallel(cp=cp), patch.dict(os.environ, {SWITCH: "0"}), whole_groups(32):
        one = group_of_one()
        group = parallel_state.get_context_parallel_group() if cp > 1 else one
        config = make_config(context_parallel_size=cp, **changes)
        layer = build_layer(config, ProcessGroupCollection(tp=one, cp=group), options)
        randomise_(layer)
        x, weight = torch.randn(
            2, TOKENS, 1, config.hidden_size, dtype=config.params_dtype
        ).unbind()
        packed = static_packed_seq_params(TOKENS, MOST, device="cpu")
        documents = static_documents_of(packed)
        first = None
        for lengths in SETS:
            mine = local_indices(lengths, cp, group.rank(), SequenceLayout(layout))
            expected = everything(layer, x[mine], weight[mine], thd(lengths))
            set_documents(packed, [0, *torch.tensor(lengths).cumsum(0).tolist()])
            if first is None:
                everything(layer, x[mine], weight[mine], packed)  # makes the tables
                first = addresses(documents)
            with no_host_reads():
                documents.refresh()
                found = everything(layer, x[mine], weight[mine], packed)
            assert addresses(documents) == first
            assert_same(found, expected, lengths, options)


def assert_same(found, expected, lengths, options) -> None:
    """The bits of ordinary documents; chunkwise to rounding: there products have other shapes."""
    for name, value in expected.items():
        if options.get("linear_cp_mode") == "chunkwise":
            largest = value.abs().max().item()
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * largest)
        else:
            assert torch.equal(found[name], value), (lengths, name)


def a_number_that_is_not_finite_stays_in_its_document(cp: int, **options) -> None:
    """NaN in the second document, shorter than the convolution reaches on every rank."""
    with parallel(cp=cp), patch.dict(os.environ, {SWITCH: "0"}):
        one, group = group_of_one(), parallel_state.get_context_parallel_group()
        config = make_config(context_parallel_size=cp)
        layer = build_layer(config, ProcessGroupCollection(tp=one, cp=group), options)
        randomise_(layer)
        lengths = (64, 4 * cp, 2 * cp, TOKENS - 64 - 6 * cp)
        mine = local_indices(lengths, cp, group.rank())
        others = (mine < 64) | (mine >= 64 + 4 * cp)
        x, weight = torch.randn(2, TOKENS, 1, config.hidden_size).unbind()
        broken = x.clone()
        broken[64 : 64 + 4 * cp] = torch.nan
        packed = static_packed_seq_params(TOKENS, MOST, device="cpu")
        set_documents(packed, [0, *torch.tensor(lengths).cumsum(0).tolist()])
        expected, found = (everything(layer, y[mine], weight[mine], packed) for y in (x, broken))
        for name in ("output", "dx"):
            assert torch.equal(found[name][others], expected[name][others]), name
            assert found[name][~others].isnan().any()


def chunkwise_takes_buffers_in_zigzag_alone() -> None:
    """Elsewhere pieces begin where documents do, which the host plans."""
    with parallel(cp=2):
        groups = ProcessGroupCollection(
            tp=group_of_one(), cp=parallel_state.get_context_parallel_group()
        )
        config = make_config(context_parallel_size=2)
        x = torch.randn(16, 1, config.hidden_size)
        for layout in ("zigzag_buffer", "contiguous"):
            options = {"linear_cp_mode": "chunkwise", "cp_layout": layout}
            layer = build_layer(config, groups, options)
            packed = static_packed_seq_params(32, 2, device="cpu")
            with pytest.raises(NotImplementedError, match=f"'zigzag', not '{layout}'"):
                layer(x, None, packed_seq_params=packed)
            auto = build_layer(config, groups, {"cp_layout": layout})
            auto(x, None, packed_seq_params=packed)
        layer = build_layer(config, groups, {"linear_cp_mode": "chunkwise"})
        layer(x, None, packed_seq_params=packed)
        with pytest.raises(RuntimeError, match="must be a multiple of 4 tokens"):
            set_documents(packed, [0, 18, 32])


@contextmanager
def capturing_by_megatron() -> Iterator[None]:
    """As in its ``create_cudagraphs``, around warm-up and capture."""
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()


def captured_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's local graphs give a layer to capture in the place of these arguments.

    The first step describes its tensors, and the capture finds tensors of zeros in their place.
    """
    described = cuda_graphs.tree_map(
        lambda x: cuda_graphs.ArgMetadata(x) if torch.is_tensor(x) else x, arguments
    )
    with capturing_by_megatron():
        return cuda_graphs.tree_map(
            lambda x: x.zeros_like() if isinstance(x, cuda_graphs.ArgMetadata) else x, described
        )


def mismatches(arguments: dict[str, Any], captured: dict[str, Any]) -> list[str]:
    """Why Megatron would not replay a graph that was recorded with ``captured`` for these."""
    runner = object.__new__(cuda_graphs._CudaGraphRunner)
    torch.nn.Module.__init__(runner)
    runner.fwd_graph_input_arg_metas = []
    runner.fwd_graph_input_kwarg_metas = {
        name: cuda_graphs.ArgMetadata(x) for name, x in captured.items()
    }
    return runner.get_mismatch_errors((), arguments)


def a_layer_in_megatrons_graphs_reads_the_buffers(cp: int = 1, **options) -> None:
    """What a capture runs has the bits of an ordinary step, for the documents that were set last.

    The boundaries that Megatron's capture sees are zeros. The host reads nothing.
    """
    with parallel(cp=cp), patch.dict(os.environ, {SWITCH: "0"}), whole_groups(32):
        one = group_of_one()
        group = parallel_state.get_context_parallel_group() if cp > 1 else one
        groups = ProcessGroupCollection(tp=one, cp=group)
        config = make_config(context_parallel_size=cp)
        eager = build_layer(config, groups, options)
        config = make_config(context_parallel_size=cp, cuda_graph_impl="local")
        layer = build_layer(config, groups, options)
        randomise_(eager)
        layer.load_state_dict(eager.state_dict())
        x, weight = torch.randn(2, TOKENS, 1, config.hidden_size).unbind()
        packed = static_packed_seq_params(TOKENS, MOST, device="cpu")
        step = {"packed_seq_params": packed}
        first = torch.randn(TOKENS // cp, 1, config.hidden_size)
        everything(layer, first, first, packed)  # the step that Megatron records
        captured = captured_arguments(step)
        assert captured["packed_seq_params"].cu_seqlens_q.tolist() == [0] * (MOST + 1)
        for lengths in SETS:
            mine = local_indices(lengths, cp, group.rank())
            set_documents(packed, [0, *torch.tensor(lengths).cumsum(0).tolist()])
            assert mismatches(step, captured) == []
            with no_host_reads(), capturing_by_megatron():
                found = everything(layer, x[mine], weight[mine], **captured)
            expected = everything(eager, x[mine], weight[mine], thd(lengths))
            assert_same(found, expected, lengths, options)


def static_mask_is_accepted(cp: int) -> None:
    """The mask that a transformer layer hands to a capture: the same on every rank."""
    with parallel(cp=cp):
        config = make_config(
            context_parallel_size=cp, cuda_graph_impl="transformer_engine", cuda_graph_modules=[]
        )
        spec = ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=TorchRMSNorm,
                self_attention=gated_delta_net_spec("local"),
                self_attn_bda=get_bias_dropout_add,
            ),
        )
        whole = build_module(spec, config, layer_number=1)
        static = whole.get_layer_static_inputs(16, 2)["attention_mask"]
        assert static.shape == (2, 1, 16 // cp, 16)
        x, layer = torch.randn(16 // cp, 2, config.hidden_size), whole.self_attention
        expected = layer(x, None)[0]
        with capturing_by_megatron():
            assert torch.equal(layer(x, static)[0], expected)
        if cp == 1:  # an ordinary causal mask
            assert torch.equal(layer(x, static)[0], expected)
        else:  # the zigzag positions of no rank
            with pytest.raises(NotImplementedError, match="is not a causal mask"):
                layer(x, static)
