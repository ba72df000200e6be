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


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """``parse(*flags)`` in an empty folder, as one of two ranks."""
    from pretraining.arguments import parse_args

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return lambda *flags: parse_args([*map(str, flags)])


@pytest.fixture
def refused(parse, capsys):
    """Flags to the line in which they are refused."""

    def line(*flags: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            parse(*flags)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and said.count("\n") == 1 and said.endswith("\n")
        return said

    return line


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test():
    yield
    from tests.examples.launching import Launch

    Launch.kill_all()
