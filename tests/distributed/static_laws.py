"""Run on every rank: documents in fixed buffers against the same documents as they come."""

import os
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn import SequenceLayout, set_documents, static_packed_seq_params
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.context_parallel.agreement import SWITCH
from megatron_gdn.packing import static_documents_of
from tests.distributed.layer_laws import build_layer, randomise_, thd
from tests.host_reads import no_host_reads
from tests.parallel import group_of_one, make_config, parallel

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


def everything(layer, x, weight, packed) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    out, _ = layer(leaf, None, packed_seq_params=packed)
    (out.float() * weight).sum().backward()
    found = {"output": out.detach(), "dx": leaf.grad}
    return found | {name: p.grad.clone() for name, p in layer.named_parameters()}


def addresses(documents) -> dict:
    """Of every tensor that is derived from the boundaries."""
    tables = {key: [x.data_ptr() for x in made] for key, (_, made) in documents._tables.items()}
    return {"plans": {key: id(plan) for key, plan in documents.plans.items()}, **tables}


def buffers_equal_ordinary_documents(cp: int = 1, layout: str = "zigzag", **changes) -> None:
    """Ten sets of documents: equal bits, at the same addresses, and the host reads nothing."""
    options = {"cp_layout": layout, **changes.pop("options", {})}
    with parallel(cp=cp), patch.dict(os.environ, {SWITCH: "0"}):
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
            for name, value in expected.items():
                assert torch.equal(found[name], value), (lengths, name)
