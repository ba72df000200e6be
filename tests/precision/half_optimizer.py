"""What is read of Megatron's Float16Optimizer, for a 16-bit parameter and one in
fp32."""

from types import SimpleNamespace

import torch
from torch import nn


def half_optimizer() -> SimpleNamespace:
    half, master, fp32 = (nn.Parameter(torch.zeros(n)) for n in (2, 2, 3))
    return SimpleNamespace(
        float16_groups=[[half]],
        fp32_from_float16_groups=[[master]],
        fp32_from_fp32_groups=[[fp32]],
        optimizer=SimpleNamespace(param_groups=[{"params": [fp32, master]}]),
    )
