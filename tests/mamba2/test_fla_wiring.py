"""When fla is Mamba2's rule, and that it has what is called."""

import pytest
import torch

from megatron_gdn.mamba2.rule import FlaSSD, SSDInputs, choose_ssd
from megatron_gdn.ops.rules import fla
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.rules.fla import why_not_callable
from megatron_gdn.ops.state_maps.state_map import StateShape
from megatron_gdn.ops.static_documents import StaticDocuments

pytest.importorskip("fla.ops.simple_gla.chunk")


def test_the_installed_fla_has_the_functions_that_are_called():
    assert why_not_callable(FlaSSD) is None


def test_fla_is_chosen_on_gpus_only():
    cpu = {
        "state": StateShape(2, 128, 64),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }
    assert choose_ssd("auto", **cpu).rule.name == "reference"
    with pytest.raises(ValueError, match="fla runs on a GPU, not on cpu"):
        choose_ssd("fla", **cpu)
    with pytest.raises(ValueError, match="fla runs on a GPU, not on cpu"):
        choose_ssd("fla", **cpu, bits=Bits.DETERMINISTIC)
    with pytest.raises(
        ValueError, match="unknown backend 'mamba_ssm' of Mamba2; use 'auto'"
    ):
        choose_ssd("mamba_ssm", **cpu)


def test_a_rule_that_reads_boundaries_on_the_host_refuses_fixed_buffers():
    inputs = SSDInputs(*(torch.zeros(1, 9, 2, 8) for _ in SSDInputs._fields))
    said = "FlaSSD reads the documents' boundaries .* Use backend='reference'"
    with pytest.raises(NotImplementedError, match=said):
        FlaSSD().begin(inputs, StaticDocuments(9, 2))


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [(65, 32, "state dim, not 65"), (64, 33, "head dim, not 33")],
)
def test_odd_sizes_go_to_the_reference(monkeypatch, rows, columns, said):
    """fla's kernel of dv refuses them in the backward, in 16 bits."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fla, "why_not_fla_package", lambda major: None)
    where = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    assert choose_ssd("auto", StateShape(2, 64, 32), **where).rule.name == "fla"
    odd = StateShape(2, rows, columns)
    assert choose_ssd("auto", odd, **where).rule.name == "reference"
    with pytest.raises(ValueError, match=f"even {said}"):
        choose_ssd("fla", odd, **where)
