"""Run on every rank: what one packed document holds is of no account to the others."""

from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers import micro_batch
from tests.distributed.layer_laws import build_layer, by_way_of, randomise_, thd
from tests.parallel import group_of_one, make_config, parallel

POISONS = (float("nan"), float("inf"), float("-inf"), 3e38)


def documents_keep_their_bits(
    cp: int, mode: str, layout: str, lengths: tuple[int, ...], exchanges: tuple[str | None, ...]
) -> None:
    """Output and input gradient of every document, whatever stands in one of the others.

    Inputs and output gradients of one document at a time are poisoned; the others' bits must be
    those of a run without. ``cp`` of 1 is the layer alone.
    """
    failures = []
    with parallel(cp=cp):
        cp_group = group_of_one() if cp == 1 else parallel_state.get_context_parallel_group()
        groups = ProcessGroupCollection(tp=group_of_one(), cp=cp_group)
        where = (cp, cp_group.rank(), SequenceLayout.parse(layout))
        mine = local_indices(lengths, *where)
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[mine]
        for exchange in exchanges:
            torch.manual_seed(7)
            with patch.object(micro_batch, "Chunkwise", by_way_of(exchange)):
                options = {"linear_cp_mode": mode, "cp_layout": layout}
                layer = build_layer(make_config(context_parallel_size=cp), groups, options)
            randomise_(layer)
            x = torch.randn(sum(lengths), 1, layer.hidden_size)[mine]
            dy = torch.randn(sum(lengths), 1, layer.hidden_size)[mine]

            def run(x, dy, layer=layer):
                leaf = x.clone().requires_grad_()
                y, _ = layer(leaf, None, packed_seq_params=thd(lengths))
                return y.detach(), *torch.autograd.grad(y, leaf, dy)

            clean = run(x, dy)
            assert all(tensor.isfinite().all() for tensor in clean)
            for n in range(len(lengths)):
                ill = document == n
                for poison in (POISONS[0], POISONS[1 + n % 3]) if lengths[n] else ():
                    got = run(*(t.masked_fill(ill[:, None, None], poison) for t in (x, dy)))
                    where = f"{poison} in document {n} of {lengths}, {exchange}"
                    for name, bits, expected in zip(("y", "dx"), got, clean, strict=True):
                        if not torch.equal(bits[~ill], expected[~ill]):
                            failures.append(f"another document's {name}: {where}")
                    if poison != 3e38 and ill.any() and got[0][ill].isfinite().all():
                        failures.append(f"not felt in its own document: {where}")
    # Not before: the other ranks would wait in the next collective.
    assert not failures, failures
