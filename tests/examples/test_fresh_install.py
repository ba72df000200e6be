"""The package alone, in environments to which this one lends what it depends on by a
path file."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from tests.examples.commands import commands_of, flags_of, pages
from tests.examples.launching import ROOT

pytestmark = pytest.mark.nightly


def shell(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def lend_dependencies(folder: Path) -> Path:
    """An environment with the packages of this one, but megatron_gdn; returns its
    python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    lent = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    (site / "lent.pth").write_text("\n".join(map(str, lent)) + "\n")
    for name, module in (("torchrun", "torch.distributed.run"), ("pytest", "pytest")):
        script = folder / "bin" / name
        run = f"runpy.run_module({module!r}, run_name='__main__')"
        script.write_text(f"#!{python}\nimport runpy\n{run}\n")
        script.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What a user gets: the files that git knows, as they are now."""
    folder = tmp_path_factory.mktemp("fresh") / "megatron_gdn"
    names = shell(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    )
    for name in names.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():  # else deleted, and not yet committed
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def pip(python: Path, *arguments: object, cwd: Path) -> str:
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    base = Path(sys._base_executable)  # has pip; the environments do without
    return shell(base, "-m", "pip", "--python", python, *arguments, *offline, cwd=cwd)


def check_quickstart(python: Path, clone: Path, away: Path) -> None:
    (away / "quickstart.py").write_text((clone / "examples/quickstart.py").read_text())
    where = shell(python, "-c", "import megatron_gdn as m; print(m.__file__)", cwd=away)
    assert str(python.parents[1] / "lib") in where
    version = shell(
        python, "-c", "import megatron_gdn as m; print(m.__version__)", cwd=away
    )
    assert (
        f'version = "{version.splitlines()[-1]}"'
        in (clone / "pyproject.toml").read_text()
    )
    assert "backend reference, output (128, 1, 64)" in shell(
        python, "quickstart.py", cwd=away
    )


def test_the_quickstart_runs_from_an_installed_clone_alone(clone, tmp_path):
    python = lend_dependencies(tmp_path / "env")
    pip(python, "install", ".", cwd=clone)
    check_quickstart(python, clone, tmp_path)


def test_the_quickstart_runs_from_an_installed_wheel_alone(clone, tmp_path):
    python = lend_dependencies(tmp_path / "env")
    pip(python, "wheel", "--wheel-dir", tmp_path / "dist", ".", cwd=clone)
    (wheel,) = (tmp_path / "dist").glob("megatron_gdn-*.whl")
    pip(python, "install", wheel, cwd=tmp_path)
    check_quickstart(python, clone, tmp_path)


@pytest.fixture(scope="module")
def sdist(clone, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = (
        "import sys; from setuptools import build_meta; "
        "build_meta.build_sdist(sys.argv[1])"
    )
    shell(sys.executable, "-c", code, folder, cwd=clone)
    (made,) = folder.glob("megatron_gdn-*.tar.gz")
    return made


def test_a_source_distribution_holds_what_tests_and_pages_need(clone, sdist):
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    known = set(shell("git", "ls-files", cwd=ROOT).splitlines())
    folders = (
        "megatron_gdn/",
        "specs/",
        "tests/",
        "docs/",
        "examples/",
        "typings/",
        ".github/",
        "benchmarks/",
    )
    wanted = {
        name for name in known if name.startswith(folders) and (clone / name).is_file()
    }
    wanted |= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
    wanted |= {"constraints.txt", "pyproject.toml", "megatron_gdn/specs/layer.py"}
    assert wanted - held == set()
    strangers = ("docs/_build", ".ci", ".venv", "runs", "dist", "build")
    assert [
        name for name in held if name.startswith(strangers) or "__pycache__" in name
    ] == []
    assert sdist.stat().st_size < 4 << 20


def test_the_quickstart_runs_from_an_installed_source_distribution_alone(
    clone, sdist, tmp_path
):
    python = lend_dependencies(tmp_path / "env")
    pip(python, "install", sdist, cwd=tmp_path)
    check_quickstart(python, clone, tmp_path)


def test_all_extras_resolve_together(clone):
    """Asks the package index, and installs nothing."""
    command = next(
        c for c in commands_of(clone / "docs/releasing.md") if "--all-extras" in c
    )
    index = {k: v for k, v in os.environ.items() if k.startswith(("UV_", "SSL_"))}
    resolved = shell(sys.executable, *command.split()[1:], cwd=clone, **index)
    extras = (
        "transformer-engine flash-qla causal-conv1d flash-linear-attention transformers"
    )
    for name in extras.split():
        assert f"\n{name}==" in resolved


def test_make_demo_and_the_lines_below_it_run_from_a_fresh_clone_as_they_stand(clone):
    lend_dependencies(clone / ".venv")
    (
        next((clone / ".venv").glob("lib/python*/site-packages")) / "clone.pth"
    ).write_text(str(clone))
    (clone / ".venv/.ready").touch()
    shutil.copytree(clone / "megatron_gdn", clone / "my_texts")
    printed = shell("make", "demo", cwd=clone)
    run = clone / "runs/pretrain_hybrid"
    for left in (
        run / "loss.png",
        run / "checkpoints/iter_0000240",
        run / "tensorboard",
    ):
        assert left.exists() and str(left.relative_to(clone)) in printed
    lines = [
        c for c in commands_of(*pages(clone)[:2]) if "examples/pretrain_hybrid.py" in c
    ]
    # A Hugging Face folder is not in a clone; test_hf_round_trip.py makes one.
    lines = [line for line in lines if "--hf-config" not in line]
    for line in lines:
        shell(*line.split(), cwd=clone)
        assert flags_of(line)[1]
    names = sorted(p.name for p in run.parent.iterdir())
    assert names == ["pretrain_hybrid", "pretrain_hybrid-2", "pretrain_hybrid-3"]
    assert (run.parent / "pretrain_hybrid-2/checkpoints/iter_0000800").is_dir()
