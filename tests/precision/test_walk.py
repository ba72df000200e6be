"""A_log is fp32, and the same bits, from construction to the exported file."""

from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_gdn.hf import build_model, load_hf_weights, read_hf_config, save_hf_weights
from tests.hf.tiny_models import make_folder
from tests.parallel import parallel
from tests.precision.training import (
    ADAM,
    FLOAT16,
    Training,
    accumulate_gradients,
    load,
    over_tp,
    replicas_of,
    save,
    wrap,
)


def build(hf_folder: Path, tp: int):
    bf16 = {"dtype": torch.bfloat16, "bf16": True, "tensor_model_parallel_size": tp}
    return build_model(read_hf_config(hf_folder), "hybrid", **bf16)[0]


class Fp32Adam:
    """Adam on one fp32 tensor, as in Kingma and Ba, algorithm 1, in torch's order of operations."""

    def __init__(self, start: torch.Tensor) -> None:
        self.value, self.step_count = start.clone(), 0
        self.m, self.v = torch.zeros_like(start), torch.zeros_like(start)

    def step(self, gradient: torch.Tensor) -> None:
        beta1, beta2 = ADAM["adam_beta1"], ADAM["adam_beta2"]
        self.step_count += 1
        self.m.lerp_(gradient, 1 - beta1)
        self.v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        m_scale = 1 - beta1**self.step_count
        v_scale = (1 - beta2**self.step_count) ** 0.5
        root = (self.v.sqrt() / v_scale).add_(ADAM["adam_eps"])
        self.value.addcdiv_(self.m, root, value=-ADAM["lr"] / m_scale)


def reduced_gradient(training: Training) -> torch.Tensor:
    """A_log's gradient as the optimizer takes it: each rank's own shard of it, put together."""
    parameter, optimizer = training.A_log, training.megatron_optimizer
    gradient = parameter.main_grad.float()
    if isinstance(optimizer, DistributedOptimizer):
        own = torch.zeros_like(gradient)
        if parameter in optimizer.model_param_gbuf_map:
            shard = optimizer._get_model_param_range_map(parameter)["param"]
            own[shard.start : shard.end] = gradient[shard.start : shard.end]
        gradient = sum(replicas_of(own))
    return over_tp(gradient)


def everywhere(training: Training) -> torch.Tensor:
    """A_log, fp32 and the same on every replica, whole."""
    parameter = training.A_log
    assert parameter.dtype == torch.float32 and parameter.keep_in_fp32
    assert all(torch.equal(one, parameter) for one in replicas_of(parameter))
    return over_tp(parameter)


def walk(kind: str, hf_folder: Path, checkpoint: str) -> dict[str, torch.Tensor]:
    """Import, wrap, three steps, save at tp2 x dp2."""
    stations = {}
    with parallel(tp=2):
        model = build(hf_folder, 2)
        A_log = model.decoder.layers[0].self_attention.A_log
        stations["constructed"] = over_tp(A_log)
        load_hf_weights(model, hf_folder)
        stations["imported"] = over_tp(A_log)
        # A value that bf16 cannot hold, whatever the file had.
        with torch.no_grad():
            A_log.copy_(A_log + torch.linspace(0.001, 0.002, A_log.numel()))
        stations["set"] = over_tp(A_log)
        training = wrap(kind, model)
        assert training.model.embedding.word_embeddings.weight.dtype == torch.bfloat16
        stations["wrapped"] = everywhere(training)
        adam = Fp32Adam(stations["wrapped"])
        for step in range(3):
            accumulate_gradients(training, step)
            adam.step(reduced_gradient(training))
            training.optimizer.step()
            stations[f"step {step}"] = everywhere(training)
            stations[f"Adam, step {step}"] = adam.value.clone()
        save(training, checkpoint)
    return stations


def arrive(kind: str, hf_folder: Path, checkpoint: str, exported: Path, tp: int) -> torch.Tensor:
    """Load at another tp and export."""
    with parallel(tp=tp):
        training = wrap(kind, build(hf_folder, tp))
        load(training, checkpoint)
        save_hf_weights(training.ddp, exported, like=hf_folder)
        return everywhere(training)


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
    ranks = pools(4).run(walk, kind, hf_folder, str(checkpoint))
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
    arrived = pools(2).run(arrive, kind, hf_folder, str(checkpoint), exported, tp=1)
    assert all(torch.equal(rank, last) for rank in arrived)
    file = in_files(exported, key)
    assert file.dtype == torch.float32 and torch.equal(file, last)
