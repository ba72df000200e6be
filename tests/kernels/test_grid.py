"""Batch-invariant mode through the Triton kernels: any cut has the bits of training."""

from __future__ import annotations

import pytest
import torch

from megatron_gdn.inference import decode, gdn_rows, mamba2_rows, prefill
from megatron_gdn.ops.gdn.rule.plain import PlainRule
from megatron_gdn.ops.gdn.sizes import HeadSizes
from megatron_gdn.ops.mamba2.rule.plain import PlainSSD
from megatron_gdn.ops.mixer import mix
from megatron_gdn.ops.neighbours import Neighbours
from tests.inference.row_mixers import DT_LIMIT, gdn_kind, mamba2_kind

SIZES = HeadSizes(1, 2, 8, 12)
GDN, MAMBA2 = gdn_kind(SIZES), mamba2_kind(heads=2, groups=1, head_dim=6, state_dim=8)


def gdn(rows, parameters):
    given = {"rule": PlainRule(aligned=True), "norm": parameters.norm, "kernels": "triton"}
    return gdn_rows(rows, *parameters.own, SIZES, **given)


def mamba2(rows, parameters):
    given = {"rule": PlainSSD(aligned=True), "norm": parameters.norm, "kernels": "triton"}
    return mamba2_rows(rows, *parameters.own, MAMBA2.layout, dt_limit=DT_LIMIT, **given)


@pytest.mark.parametrize(("kind", "make"), [(GDN, gdn), (MAMBA2, mamba2)], ids=["gdn", "mamba2"])
def test_prefill_and_steps_in_slots_have_the_bits_of_training(kind, make, device):
    rows = kind.rows(67, 2).to(device)
    parts = make(rows, kind.draw(torch.float32).to(device))
    assert parts.front.triton
    with torch.no_grad():
        whole = mix(rows, parts, Neighbours(None))
    mixed, carry = prefill(rows[:61], parts)
    assert torch.equal(mixed, whole[:61])
    mixed, after = decode(rows[61:], parts, carry, stands=[61, 61])
    assert torch.equal(mixed, whole[61:])
    assert not torch.equal(after[1].state, after[2].state)
