"""The fp32 values of a checkpoint's optimizer go into the parameters of a model."""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import nn

from megatron_gdn.fp32_masters import load_fp32_masters

MASTER = "optimizer.state.fp32_param."


class Model(nn.Module):
    """Three parameters that are fp32 in memory, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(3))
        self.gate.keep_in_fp32 = True
        self.exact = nn.Parameter(torch.zeros(3))
        self.exact.keep_in_fp32 = True
        self.unlisted = nn.Parameter(torch.zeros(3))  # without a master
        self.unlisted.keep_in_fp32 = True
        self.weight = nn.Parameter(torch.zeros(3))

    def sharded_state_dict(self, metadata=None):
        return {
            name: ShardedTensor.from_rank_offsets(name, parameter)
            for name, parameter in self.named_parameters()
        }


def stored(key: str, dtype: torch.dtype) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("in_chunks", [False, True])
def test_only_parameters_that_the_file_has_in_16_bits_get_their_masters(
    monkeypatch, in_chunks
):
    dtypes = {
        "gate": torch.bfloat16,
        "exact": torch.float32,
        "unlisted": torch.bfloat16,
        "weight": torch.bfloat16,
        f"{MASTER}gate": torch.float32,
        f"{MASTER}exact": torch.float32,
        f"{MASTER}weight": torch.float32,
    }
    saved = {key: stored(key, dtype) for key, dtype in dtypes.items()}
    values = torch.tensor([1.0, 2.0**-20, 3.0])
    monkeypatch.setattr(dist_checkpointing, "load_tensors_metadata", lambda _: saved)
    monkeypatch.setattr(
        dist_checkpointing, "load", lambda state, _: dict.fromkeys(state, values)
    )
    model = Model()
    given = [model] if in_chunks else model
    assert load_fp32_masters(given, "folder") == ["gate"]
    assert torch.equal(model.gate.detach(), values)
    assert model.gate.requires_grad
    for name in ("exact", "unlisted", "weight"):
        assert not model.get_parameter(name).any(), name
