"""The repair of Megatron's distributed optimizer over torch's Adam is put where Megatron
looks for it."""

import pytest
from megatron.core.optimizer import distrib_optimizer

from megatron_gdn.compat.one_process import (
    resume_distributed_optimizer_with_torch_adam,
)

REPLACED = (
    "state_dict",
    "load_state_dict",
    "sharded_state_dict",
    "_set_main_param_and_optimizer_states",
)


@pytest.mark.parametrize("is_fused", [False, True], ids=["torch", "Apex or TE"])
def test_megatrons_optimizer_over_torchs_adam_is_repaired_once(monkeypatch, is_fused):
    whole = distrib_optimizer.DistributedOptimizer
    # an earlier test of this process may have repaired the class
    monkeypatch.delattr(whole, "_steps_are_unshared", raising=False)
    optimizer = type("Optimizer", (whole,), {})
    monkeypatch.setattr(distrib_optimizer, "DistributedOptimizer", optimizer)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", is_fused)
    resume_distributed_optimizer_with_torch_adam()
    first = [vars(optimizer).get(name) for name in REPLACED]
    assert [method is None for method in first] == [is_fused] * len(REPLACED)
    resume_distributed_optimizer_with_torch_adam()
    assert [vars(optimizer).get(name) for name in REPLACED] == first
