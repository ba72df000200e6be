"""What an import may need, each tried in a process of its own."""

import tomllib
from importlib import import_module

import pytest

from tests.processes import ROOT, python, python_without

RULE = """
import torch, megatron_gdn.inference, megatron_gdn.ops as ops
x = torch.rand(1, 5, 2, 4)
ops.gated_delta_rule(x, x, x, -x[..., 0], x[..., 0])
"""
LAYER = """
import torch
import megatron_gdn
import megatron_gdn.hf.drop_in.patching, megatron_gdn.hf.drop_in.training
megatron_gdn.GatedDeltaNet
import megatron_gdn.specs
import megatron_gdn.hf, megatron_gdn.models
megatron_gdn.hf.transformer_config(megatron_gdn.models.find("tiny").hf)
print(torch.cuda.is_initialized())
"""


def test_ops_and_carried_states_need_torch_alone(tmp_path):
    others = "megatron fla triton transformers transformer_engine numpy"
    python_without(others, RULE, tmp_path)


def test_the_layer_needs_torch_and_megatron_alone_and_touches_no_gpu(tmp_path):
    others = "fla transformers transformer_engine causal_conv1d flash_qla safetensors"
    assert python_without(others, LAYER, tmp_path) == "False"


def test_the_drop_in_does_not_load_the_compiler():
    """torch's Dynamo takes seconds to import; only ``torch.compile`` needs it."""
    drop_in = "import sys, megatron_gdn.hf.drop_in.patching"
    done = python("-c", f"{drop_in}; print('torch._dynamo' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "GatedDeltaNet",
        "GatedDeltaNetSubmodules",
        "_split_tensor_factory",
        "get_parameter_local_cp",
        "tensor_a2a_cp2hp",
        "tensor_a2a_hp2cp",
        "torch_chunk_gated_delta_rule",
    ],
)
def test_every_name_of_upstreams_module_is_at_the_top(name):
    import megatron_gdn

    assert getattr(megatron_gdn, name) is not None
    assert (name in megatron_gdn.__all__) == (not name.startswith("_"))


@pytest.mark.parametrize("package", ["", ".hf", ".models", ".ops"])
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=r"'megatron_gdn.*'GatedDeltaNot'"):
        _ = import_module(f"megatron_gdn{package}").GatedDeltaNot


def test_the_version_is_that_of_pyproject_installed_or_not():
    """Without packages there is no installed one (nor torch, which it does not
    need)."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for options in ([], ["-S"]):
        done = python(*options, "-c", "import megatron_gdn as m; print(m.__version__)")
        assert done.stdout.strip() == pyproject["project"]["version"]


def test_a_wheel_holds_every_package_and_data_file_and_no_other():
    """A wheel without them installs well, and fails at the user's first import."""
    from setuptools import find_packages

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = find_packages(
        str(ROOT), **pyproject["tool"]["setuptools"]["packages"]["find"]
    )
    files = (ROOT / "megatron_gdn").rglob("__init__.py")
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in files}
    assert set(found) == there | {"megatron_gdn.specs"}
    home = ROOT / "megatron_gdn"
    others = {path for path in home.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    data = pyproject["tool"]["setuptools"]["package-data"]["megatron_gdn"]
    assert others == {home / name for name in data}
