"""Gated DeltaNet-2 beside Megatron main's own layer and its rule in torch, from one
checkpoint."""

import os

import pytest
import torch

from tests.launches.launching import CLONE, PATIENCE_S
from tests.processes import ROOT, python
from tests.ranks import on_ranks

BEHIND = "GDN2_BEHIND_MEGATRON_LM"  # set in a process whose Megatron is the clone's
# Both sides compute in fp32, in another order: some hundred additions of 6e-8 each.
TOLERANCE = 2e-5


@pytest.mark.slow
@pytest.mark.skipif(
    CLONE is None, reason="MEGATRON_LM=folder names a clone of Megatron-LM"
)
@pytest.mark.skipif(BEHIND in os.environ, reason="runs below")
def test_checkpoints_and_outputs_are_those_of_megatrons_layer():
    assert CLONE is not None
    if not os.path.exists(f"{CLONE}/megatron/core/ssm/gated_delta_net/gdn2.py"):
        pytest.skip("this branch has no Gated DeltaNet-2")
    environment = {
        "PYTHONPATH": f"{ROOT}:{CLONE}",
        BEHIND: "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = "-m", "pytest", "-q", "-x", __file__, "-k", "loads or builds"
    assert "......." in python(*command, timeout=PATIENCE_S, **environment).stdout


behind = pytest.mark.skipif(BEHIND not in os.environ, reason="in a process of its own")


@behind
@on_ranks(tp=1)
def test_a_call_of_megatrons_class_builds_ours_until_it_is_given_back():
    from megatron.core.ssm import gated_delta_net as package

    from megatron_gdn import GatedDeltaNet2, patch_megatron
    from megatron_gdn.compat.one_process import run_megatron_on_cpu
    from tests.distributed.mixers import PARTS
    from tests.parallel import groups_of_megatron, make_config

    run_megatron_on_cpu()
    theirs = package.GatedDeltaNet2
    parts = package.GatedDeltaNetSubmodules(**PARTS)
    found = []
    for gdn in (True, False):
        patch_megatron(gdn=gdn)
        config = make_config(deterministic_mode=True)
        found.append(type(theirs(config, parts, 1, pg_collection=groups_of_megatron())))
    assert found == [GatedDeltaNet2, theirs]


@behind
@pytest.mark.parametrize("writer", ["theirs", "ours"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@on_ranks(4)
def test_what_one_layer_saves_the_other_loads_at_any_size(writer, tp):
    from megatron.core import dist_checkpointing

    from megatron_gdn.compat.one_process import run_megatron_on_cpu
    from tests.distributed.mixer_laws import in_a_shared_folder
    from tests.distributed.mixers import PARTS, build_gdn2, draw_
    from tests.parallel import assert_close, groups_of_megatron, make_config, parallel
    from tests.upstream import upstream_on_cpu

    run_megatron_on_cpu()
    package = upstream_on_cpu()
    # Under tensor parallelism Megatron's layer leaves out_norm's gradient to others'
    # heads alone.
    exact = {"deterministic_mode": True}

    def theirs(config):
        parts = package.GatedDeltaNetSubmodules(**PARTS)
        return package.GatedDeltaNet2(
            config, parts, 1, pg_collection=groups_of_megatron()
        )

    def ours(config):
        return build_gdn2(config, groups_of_megatron())

    builders = {"theirs": theirs, "ours": ours}
    reader = {"theirs": "ours", "ours": "theirs"}[writer]

    def moved(folder):
        with parallel(tp=tp):
            torch.manual_seed(7)
            first = builders[writer](
                make_config(tensor_model_parallel_size=tp, **exact)
            )
            torch.manual_seed(3)
            draw_(first)
            with torch.no_grad():
                first.out_norm.weight.fill_(0.9)
            dist_checkpointing.save(first.sharded_state_dict(), folder)
            x = torch.randn(70, 2, 24, generator=torch.Generator().manual_seed(5))
            of_first = x.clone().requires_grad_()
            wanted, _ = first(of_first, None)
            wanted.square().sum().backward()
        size = 4 // tp
        with parallel(tp=size):
            second = builders[reader](
                make_config(tensor_model_parallel_size=size, **exact)
            )
            loaded = dist_checkpointing.load(second.sharded_state_dict(), folder)
            second.load_state_dict(loaded)
            assert {n for n, _ in second.named_parameters()} == {
                n for n, _ in first.named_parameters()
            }
            of_second = x.clone().requires_grad_()
            found, _ = second(of_second, None)
            found.square().sum().backward()
        assert_close("output", found, wanted, TOLERANCE)
        assert_close("input gradient", of_second.grad, of_first.grad, TOLERANCE)
        if tp == size:
            for name, parameter in second.named_parameters():
                if name != "out_norm.weight":
                    assert_close(
                        name, parameter.grad, first.get_parameter(name).grad, TOLERANCE
                    )

    in_a_shared_folder(moved)
