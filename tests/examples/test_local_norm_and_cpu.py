"""TorchRMSNorm is the formula; running Megatron on the CPU leaves everybody else's
torch alone."""

from inspect import signature

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.hybrid import hybrid_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_gdn.compat.one_process import use_torch_norm_after_the_last_hybrid_layer
from megatron_gdn.compat.torch_linear import DuplicatedLinear
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from tests.parallel import make_config
from tests.processes import imported_python


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_its_formula(zero_centered, dtype):
    config = make_config(
        layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype
    )
    norm = TorchRMSNorm(config, 13, eps=1e-3)
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.add_(torch.randn(13))
    x = torch.randn(3, 2, 13, dtype=dtype, requires_grad=True)
    y = norm(x)
    x64 = x.detach().double()
    gamma = norm.weight.detach().double() + zero_centered
    exact = x64 * (x64.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * gamma
    assert y.dtype == dtype
    # fp32 inside, so one rounding to the output type: half a unit in the last place of
    # |y|, and for fp32 itself a few roundings more.
    ulp = torch.finfo(dtype).eps
    roundings = 0.5 if dtype == torch.bfloat16 else 8.0
    assert ((y.double() - exact).abs() <= (roundings * ulp * 1.01) * exact.abs()).all()
    y.sum().backward()
    assert norm.weight.grad.dtype == dtype and norm.weight.grad.isfinite().all()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_starts_with_gamma_one(zero_centered):
    x = torch.randn(5, 8)
    norm = TorchRMSNorm(make_config(layernorm_zero_centered_gamma=zero_centered), 8)
    assert torch.equal(norm.weight, torch.zeros(8) if zero_centered else torch.ones(8))
    torch.testing.assert_close(
        norm(x).square().mean(-1), torch.ones(5), rtol=1e-4, atol=0
    )


def test_the_weight_is_marked_for_sequence_parallel_gradient_sums():
    for wanted in (False, True):
        config = make_config(tensor_model_parallel_size=2, sequence_parallel=wanted)
        assert TorchRMSNorm(config, 8).weight.sequence_parallel is wanted


@pytest.mark.parametrize("there", [False, True])
def test_a_hybrid_models_final_norm_is_that_of_an_engine_that_is_there(
    monkeypatch, there
):
    theirs = object()
    monkeypatch.setattr(transformer_engine, "HAVE_TE", there)
    monkeypatch.setattr(hybrid_block, "TENorm", theirs)
    use_torch_norm_after_the_last_hybrid_layer()
    assert hybrid_block.TENorm is (theirs if there else TorchRMSNorm)


def test_it_has_the_epsilon_of_megatrons_norms():
    config = make_config()
    eps = signature(WrappedTorchNorm.__new__).parameters["eps"].default
    assert TorchRMSNorm(config, 8).eps == eps == config.layernorm_epsilon


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_parameters_are_on_the_cpu_on_request_and_where_there_is_no_gpu(
    monkeypatch, has_gpu, on_cpu
):
    """The device ``meta`` is the GPU here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    config = make_config(use_cpu_initialization=on_cpu)
    made = {"parallel_mode": "duplicated", "init_method": nn.init.zeros_}
    devices = {
        TorchRMSNorm(config, 8).weight.device.type,
        DuplicatedLinear(8, 8, config=config, **made).weight.device.type,
    }
    assert devices == {"meta" if has_gpu and not on_cpu else "cpu"}


def test_another_normalization_is_refused():
    with pytest.raises(ValueError, match='set normalization="RMSNorm"'):
        TorchRMSNorm(make_config(normalization="LayerNorm"), 8)


OTHERS = """
from time import perf_counter, sleep

import torch
from megatron_gdn.compat.one_process import run_megatron_on_cpu

run_megatron_on_cpu()
first = torch.Tensor.type
run_megatron_on_cpu()
assert torch.Tensor.type is first, "installed twice"
x = torch.zeros(3)
assert x.type() == "torch.FloatTensor"
assert x.type(torch.int64).dtype == torch.int64
for attempt in (x.cuda, lambda: torch.zeros(1, device="cuda")):
    try:
        attempt()
    except (AssertionError, RuntimeError):
        continue
    raise SystemExit("a GPU appeared from nowhere")
assert not torch.cuda.is_available()

first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begun = perf_counter()
first.record()
sleep(0.005)
assert torch.cuda.current_stream().record_event(last) is last and last.query()
assert 4.9 <= first.elapsed_time(last) <= 1e3 * (perf_counter() - begun)

from megatron.core import tensor_parallel
from megatron.core.optimizer import clip_grads

assert clip_grads.torch.zeros(1, device="cuda").device.type == "cpu"
assert clip_grads.torch.Tensor is torch.Tensor
tracker = tensor_parallel.get_cuda_rng_tracker()
tracker.add("mine", 7)
before = torch.get_rng_state()
with tracker.fork("mine"):
    drawn = torch.rand(2)
assert torch.equal(before, torch.get_rng_state())
torch.manual_seed(7)
assert torch.equal(drawn, torch.rand(2))
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="nothing is changed when there is a GPU"
)
def test_only_megatron_sees_the_cpu_as_its_gpu(tmp_path):
    script = tmp_path / "others.py"
    script.write_text(OTHERS)
    imported_python(script)
