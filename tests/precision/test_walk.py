"""A_log is fp32, and the same bits, from construction to the exported file."""

import pytest
import torch

from tests.hf.tiny_models import make_folder
from tests.precision import walk_laws as laws
from tests.precision.training import FLOAT16


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "only_gdn"
    make_folder("only gdn", folder)
    return folder


def in_files(folder, key: str) -> torch.Tensor:
    from safetensors.torch import load_file

    (tensor,) = (
        tensors[key] for path in folder.glob("*.safetensors") if key in (tensors := load_file(path))
    )
    return tensor


@pytest.mark.parametrize(
    "kind", [pytest.param(FLOAT16, marks=pytest.mark.slow), "fully_reshardable"]
)
def test_A_log_keeps_its_bits_from_construction_to_the_exported_file(
    pools, hf_folder, tmp_path, kind
):
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    checkpoint.mkdir()
    key = "model.layers.0.linear_attn.A_log"
    ranks = pools(4).run(laws.walk, kind, hf_folder, str(checkpoint))
    for at in ranks:
        assert at["constructed"].dtype == torch.float32
        assert torch.equal(at["imported"], in_files(hf_folder, key))
        assert not torch.equal(at["set"], at["set"].bfloat16().float())
        assert torch.equal(at["wrapped"], at["set"])
        for step in range(3):
            assert torch.equal(at[f"step {step}"], at[f"Adam, step {step}"]), step
        assert (at["step 2"] - at["set"]).abs().min() > 0
    last = ranks[0]["step 2"]
    assert not torch.equal(last, last.bfloat16().float())
    arrived = pools(2).run(laws.arrive, kind, hf_folder, str(checkpoint), exported, tp=1)
    assert all(torch.equal(rank, last) for rank in arrived)
    file = in_files(exported, key)
    assert file.dtype == torch.float32 and torch.equal(file, last)
