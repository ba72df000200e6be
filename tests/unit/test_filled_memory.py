"""New memory holds NaN in tests: here, on their ranks and in their scripts."""

import pytest
import torch

from tests.filled_memory import fill_new_memory
from tests.processes import imported_python
from tests.ranks import on_ranks

MAKERS = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((3,), (2,), dtype=x.dtype),
    "empty_permuted": lambda x: torch.empty_permuted((3,), (0,), dtype=x.dtype),
    "new_empty": lambda x: x.new_empty(3),
    "new_empty_strided": lambda x: x.new_empty_strided((3,), (1,)),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_new_memory_holds_nan_or_the_largest_integer(make):
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        assert make(torch.zeros(3, dtype=dtype)).to(torch.complex64).isnan().all()
    for dtype in (torch.int32, torch.int64, torch.uint8):
        assert (make(torch.zeros(3, dtype=dtype)) == torch.iinfo(dtype).max).all()
    assert make(torch.zeros(3, dtype=torch.bool)).all()


def test_parameters_are_leaves_and_what_has_no_memory_stays_so():
    assert torch.empty(3, requires_grad=True).is_leaf
    assert torch.empty(3, device="meta").is_meta
    with torch.device("meta"):
        for make in MAKERS.values():
            assert make(torch.zeros(3)).is_meta
    out = torch.zeros(3)
    assert not torch.empty(3, out=out).isnan().any()


@on_ranks(2)
def test_the_ranks_of_tests_have_it_too():
    assert torch.empty(3).isnan().all()


def test_scripts_of_tests_have_it_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(torch.empty(3).isnan().all().item())")
    assert imported_python(script).strip() == "True"


def test_the_sanitizer_sees_memory_that_nobody_has_written(monkeypatch):
    monkeypatch.setenv("SANITIZE_FOUND", "found.json")
    monkeypatch.setattr(torch, "empty", torch.empty.__wrapped__)
    fill_new_memory()
    assert not hasattr(torch.empty, "__wrapped__")
