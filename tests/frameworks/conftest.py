"""One process of Megatron, and what a framework's laws patched is undone after each."""

import re

import pytest

from tests import ranks
from tests.processes import ROOT


def page_lines(name: str) -> list[str]:
    """The blocks of Python on a framework's page."""
    page = ROOT / f"docs/frameworks/{name}.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.fixture
def forked_with_the_stand_in(monkeypatch):
    """Ranks import the stand-in for Transformer Engine before they import Megatron."""
    imported = ["tests.frameworks.behind_te_on_cpu", *ranks._IMPORTED_ONCE]
    monkeypatch.setattr(ranks, "_IMPORTED_ONCE", imported)


@pytest.fixture
def undone():
    import megatron_gdn

    yield
    megatron_gdn.patch_megatron(gdn=False)


@pytest.fixture
def one_process(undone):
    from megatron_gdn.compat.one_process import end_one_process, start_one_process

    start_one_process()
    yield
    end_one_process()


@pytest.fixture
def patched(one_process):
    import megatron_gdn

    megatron_gdn.patch_megatron()
