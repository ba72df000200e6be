"""Makes `examples/` importable the way torchrun does for the script that lies in it."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

# A slow moment of a shared machine is not a failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(30):
        lines = [f"def f{n}_{i}(x):\n    return x + {i}\n" for i in range(n * n % 17)]
        (folder / f"{n:02}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test():
    yield
    from tests.examples.launching import Launch

    Launch.kill_all()
