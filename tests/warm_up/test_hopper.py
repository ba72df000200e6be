"""The stand-in for a GPU."""

import sys

import torch

from megatron_gdn.warm_up.hopper import import_flash_qla

# As flash_qla decorates functions of its own.
FLASH_QLA = """
import torch

@torch.compile
def plain(): ...

@torch.compile(dynamic=True)
def with_options(): ...

@torch.compiler.disable
def disabled(): ...

functions = [plain, with_options, disabled]
"""


def test_flash_qla_is_imported_without_torchs_compiler(tmp_path, monkeypatch):
    (tmp_path / "flash_qla.py").write_text(FLASH_QLA)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_qla", raising=False)
    usual = torch.compile, torch.compiler.disable
    import_flash_qla()
    functions = sys.modules.pop("flash_qla").functions
    assert [type(function) for function in functions] == [type(usual[0])] * 3
    assert not any(hasattr(function, "__wrapped__") for function in functions)
    assert (torch.compile, torch.compiler.disable) == usual
