"""Which delta rule the mixer takes, and what it says when one cannot be had."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_gdn.ops.fused import HeadSizes, gated_delta_mixer, resolve_core
from megatron_gdn.ops.fused.cores import why_not_flash_qla
from megatron_gdn.ops.fused.once import say_once

SIZES = HeadSizes(16, 32, 128, 128)


def test_auto_on_cpu_is_the_reference_and_says_why():
    core, reason = resolve_core(device="cpu", dtype=torch.bfloat16, sizes=SIZES)
    assert core.name == "reference"
    assert "not on cpu" in reason


@pytest.mark.parametrize("name", ["flash_qla", "fla"])
def test_a_named_gpu_core_is_refused_on_cpu_and_never_replaced(name):
    with pytest.raises(ValueError, match="runs on a GPU, not on cpu"):
        resolve_core(name, device="cpu", dtype=torch.bfloat16, sizes=SIZES)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'flash_qla', 'fla', 'reference'"):
        resolve_core("flashqla", device="cpu", dtype=torch.bfloat16, sizes=SIZES)


def test_deterministic_refuses_fla_and_auto_takes_the_reference():
    with pytest.raises(ValueError, match="not repeatable"):
        resolve_core("fla", device="cpu", dtype=torch.bfloat16, sizes=SIZES, deterministic=True)
    choice = resolve_core(device="cpu", dtype=torch.bfloat16, sizes=SIZES, deterministic=True)
    assert choice == (choice.core, "deterministic mode") and choice.core.name == "reference"


@pytest.mark.parametrize(
    ("dtype", "sizes", "why"),
    [
        (torch.float32, SIZES, "takes bf16 or fp16"),
        (torch.bfloat16, HeadSizes(16, 32, 64, 128), "key_head_dim=64"),
        (torch.bfloat16, HeadSizes(16, 32, 128, 256), "value_head_dim=256"),
    ],
)
def test_flash_qla_names_the_size_or_dtype_it_cannot_take(dtype, sizes, why):
    assert why in why_not_flash_qla(torch.device("cuda"), dtype, sizes)


def test_a_slower_rule_and_slower_kernels_are_announced_once(caplog):
    say_once.cache_clear()
    sizes = HeadSizes(1, 1, 4, 4)
    proj, weight = torch.zeros(3, 1, sizes.width), torch.zeros(12, 1, 9)
    with caplog.at_level("INFO", logger="megatron_gdn.ops.fused"):
        for _layer in range(3):
            core = resolve_core(device="cpu", dtype=torch.float32, sizes=sizes).core
            zeros = torch.zeros(1)
            gated_delta_mixer(proj, weight, None, zeros, zeros, sizes, core=core, norm=None)
    rule, kernels = (record.getMessage() for record in caplog.records)
    assert "'reference'" in rule and "not flash_qla" in rule
    assert "plain torch" in kernels and "not on cpu" in kernels


def test_importing_the_mixer_loads_no_kernel_package():
    program = (
        "import sys, megatron_gdn.ops.fused; "
        "loaded = {'triton', 'fla', 'flash_qla', 'megatron.core'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
