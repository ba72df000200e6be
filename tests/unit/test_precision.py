import pytest
import torch
from torch import nn

from megatron_gdn.parameter_marks import MarkedParameters
from megatron_gdn.precision import Fp32Parameters, mark_keep_in_fp32


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


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: nn.Sequential(m).bfloat16()[0],
    ],
)
def test_casting_the_module_leaves_every_bit_of_the_named_parameter(cast):
    module = Small()
    before, identity = module.A_log.detach().clone(), module.A_log
    module.A_log.grad = torch.rand(7)
    module = cast(module)
    assert module.A_log is identity and torch.equal(module.A_log, before)
    assert module.A_log.dtype == module.A_log.grad.dtype == torch.float32
    assert module.weight.dtype != torch.float32


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
