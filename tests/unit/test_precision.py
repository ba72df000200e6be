from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_gdn.mixers import precision
from megatron_gdn.mixers.precision import (
    Fp32Parameters,
    mark_keep_in_fp32,
    prepare_fsdp_for_mixed_dtypes,
)
from megatron_gdn.mixers.tensor_parallel import MarkedParameters


class Small(MarkedParameters, Fp32Parameters, nn.Module):
    _keep_in_float32_parameter_names = ("A_log",)

    def __init__(self, device="cpu"):
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(7, device=device))
        self.weight = nn.Parameter(torch.rand(3, device=device))
        self.conv = nn.Linear(2, 2, device=device)
        self.conv.weight.tensor_model_parallel = True
        mark_keep_in_fp32(self.A_log)
        self.remember_marks()


F32 = torch.float32
F64 = torch.float64


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.bfloat16(), F32),
        (lambda m: m.half(), F32),
        (lambda m: m.to(torch.bfloat16), F32),
        (lambda m: nn.Sequential(m).bfloat16()[0], F32),
        (lambda m: m.double(), F64),
        (lambda m: m.double().bfloat16(), F32),
    ],
)
def test_casting_the_module_leaves_every_bit_of_the_named_parameter(cast, dtype):
    module = Small()
    before = module.A_log.detach().clone()
    identity = module.A_log
    module.A_log.grad = torch.rand(7)
    module = cast(module)
    assert module.A_log is identity and torch.equal(module.A_log, before.to(dtype))
    assert module.A_log.dtype == module.A_log.grad.dtype == dtype
    assert module.weight.dtype != torch.float32


def test_a_module_whose_named_parameter_was_taken_away_is_cast():
    """torch's first FSDP keeps parameters in one flat tensor of its own."""
    module = Small()
    del module.A_log
    assert module.bfloat16().weight.dtype == torch.bfloat16


def test_marks_are_numbers_texts_and_lists_of_these():
    """A tensor that a caller hangs on a parameter is not a mark of its successor."""
    module = Small()
    marks = {"sizes": [1, 2], "names": (None, ["a", 0.5])}
    others = {"grads": [1, torch.ones(1)], "module": module, "_own": 1}
    vars(module.weight).update(marks | others)
    module.remember_marks()
    module.weight = nn.Parameter(torch.zeros(3))
    module.mark_parameters()
    assert vars(module.weight) == marks | {"marked_by_gdn": True}


@pytest.mark.parametrize("swap", [False, True])
def test_a_module_from_the_meta_device_keeps_dtype_and_mark(swap):
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module = Small("meta").bfloat16().to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert module.A_log.dtype == torch.float32 and module.A_log.keep_in_fp32
    assert module.weight.dtype == torch.bfloat16
    assert module.conv.weight.tensor_model_parallel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_rounded_parameter_is_named_once_per_load(caplog, dtype):
    model = nn.Sequential(Small(), Small())
    state = {
        k: v.to(dtype) if "A_log" in k else v for k, v in model.state_dict().items()
    }
    for _ in range(2):
        caplog.clear()
        model.load_state_dict(state)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"0.A_log ({str(dtype)[6:]})" in record.getMessage()
        assert "load_fp32_masters" in record.getMessage()
    assert model[0].A_log.dtype == torch.float32
    assert torch.equal(model[0].A_log, state["0.A_log"].float())


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, F32), (torch.float16, F32), (F32, F32), (F64, F64)],
)
def test_what_is_assigned_is_fp32_or_wider(dtype, wide):
    module = Small("meta")
    state = {
        key: torch.rand(value.shape, dtype=dtype)
        for key, value in module.state_dict().items()
    }
    given = dict(state)
    module.load_state_dict(state, assign=True)
    assert module.A_log.dtype == wide and module.weight.dtype == dtype
    assert (
        torch.equal(module.A_log, given["A_log"].to(wide))
        and state["A_log"] is given["A_log"]
    )
    assert module.A_log.keep_in_fp32
    module.require_fp32_parameters()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_state_of_the_modules_own_dtype_is_not_called_rounded(caplog, dtype):
    module = Small().to(dtype)
    module.load_state_dict(module.state_dict())
    assert not caplog.records


def test_what_a_file_lacks_is_not_called_rounded(caplog):
    module = Small()
    state = {k: v for k, v in module.state_dict().items() if k != "A_log"}
    assert module.load_state_dict(state, strict=False).missing_keys == ["A_log"]
    assert not caplog.records


def test_what_is_assigned_may_lack_parameters_or_be_integers():
    module = Small("meta")
    state = {"A_log": torch.arange(7), "conv.bias": torch.ones(2)}
    missing = module.load_state_dict(state, strict=False, assign=True).missing_keys
    assert set(missing) == {"weight", "conv.weight"}
    assert module.A_log.dtype == F32 and module.A_log.tolist() == list(range(7))
    module = Small()
    before = module.A_log.detach().clone()
    module.load_state_dict({"weight": torch.ones(3)}, strict=False, assign=True)
    assert torch.equal(module.A_log, before)


@pytest.mark.parametrize(
    ("fused", "dtypes"),
    [
        (True, (F32, torch.bfloat16)),
        (False, (F32, torch.bfloat16)),
        (True, (F32, F32)),
    ],
    ids=str,
)
def test_only_a_fusion_that_is_on_is_switched_off_and_told(fused, dtypes, monkeypatch):
    """Megatron-FSDP over nccl, where a layer's parameters are of two dtypes."""
    said = []
    monkeypatch.setattr(precision, "log_once", said.append)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    whole = nn.Parameter(torch.zeros(2))
    config = SimpleNamespace(gradient_reduce_div_fusion=fused)
    buffer = SimpleNamespace(
        parameter_groups=[SimpleNamespace(dtype=x) for x in dtypes],
        param_to_param_group={whole: 0},
        bucket_to_bucket_group={0: [0, 1]},
        ddp_config=config,
    )
    model = SimpleNamespace(param_and_grad_buffer=buffer)
    model.dist_index = SimpleNamespace(get_fsdp_group=lambda: None)
    whole._megatron_fsdp_model = model
    whole.orig_param = whole
    prepare_fsdp_for_mixed_dtypes("A_log", whole)
    off = fused and len(set(dtypes)) == 2
    assert config.gradient_reduce_div_fusion is (fused and not off)
    assert len(said) == off
