"""Checkpoints of earlier versions load, optimizer included, at every tensor-parallel
size."""

import json
import tarfile
from pathlib import Path

import pytest

from megatron_gdn.hf import export_folder, import_folder
from tests.golden import write
from tests.golden.folders import KEPT, LATER, folder_of, kept_of
from tests.golden.models import (
    FILES,
    MODELS,
    RANKS,
    differences,
    load_and_save,
    models_of,
)

_NAMES = sorted(file.name.removesuffix(".tar.xz") for file in FILES.iterdir())
VERSIONS = [name for name in _NAMES if not name.endswith("-hf")]
OLDEST = VERSIONS[0]
ADDED = ("gdp", "kda")  # the latter with full gates, since 0.2.0


def _slow_unless(quick: bool) -> tuple:
    return () if quick else (pytest.mark.slow,)


# A quick test has each folder once, of the oldest version that kept it.
FOLDERS = [
    pytest.param(
        archive,
        folder_of(name),
        kind,
        marks=_slow_unless(archive == f"{OLDEST}-hf" or name in LATER[f"{OLDEST}-hf"]),
    )
    for archive in _NAMES
    if archive.endswith("-hf")
    for name, kinds in kept_of(archive).items()
    for kind in kinds
]
# Quick tests load at the other tensor-parallel size, to and fro in turns: each mixer as
# the first version saved it that had it so.
CASES = [
    pytest.param(
        version,
        name,
        saved_at,
        tp,
        marks=_slow_unless(
            (saved_at, tp) == (RANKS if number % 2 else RANKS[::-1])
            and (version == OLDEST or name in ADDED)
        ),
    )
    for tp in RANKS  # one after the other: each size has ranks of its own
    for version in VERSIONS
    for number, name in enumerate(models_of(version))
    for saved_at in RANKS
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """``kept(version)``: the folder with the checkpoints of a version."""
    made: dict[str, Path] = {}

    def unpacked(version: str) -> Path:
        if version not in made:
            made[version] = tmp_path_factory.mktemp(version)
            with tarfile.open(FILES / f"{version}.tar.xz") as archive:
                archive.extractall(made[version], filter="data")
        return made[version]

    return unpacked


@pytest.mark.parametrize(("version", "name", "saved_at", "tp"), CASES)
def test_an_earlier_versions_checkpoint_loads_bit_for_bit(
    pools, kept, tmp_path, version, name, saved_at, tp
):
    folder = str(kept(version) / f"{name}-tp{saved_at}")
    again = str(tmp_path / "again")
    losses = pools(tp).run(load_and_save, version, name, tp, folder, again)
    assert pools(tp).run(differences, version, name, folder, again)[0] == []
    wanted = json.loads(Path(f"{folder}.json").read_text())
    # Another machine or tensor-parallel size rounds some twenty bf16 products
    # otherwise.
    assert losses == pytest.approx([wanted] * tp, rel=2**-8)


@pytest.mark.parametrize(("version", "name", "kind"), FOLDERS)
def test_what_an_earlier_version_imported_exports_to_its_source(
    kept, tmp_path, version, name, kind
):
    source = kept(version) / name
    export_folder(kept(version) / f"{name}-{kind}", tmp_path / "back", like=source)
    files = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == files
    for file in files:
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize(("version", "name", "kind"), FOLDERS)
def test_a_folder_is_imported_as_an_earlier_version_imported_it(
    pools, kept, tmp_path, version, name, kind
):
    import_folder(kept(version) / name, tmp_path / "again", kind)
    before = str(kept(version) / f"{name}-{kind}/release")
    again = str(tmp_path / "again/release")
    assert pools(1).run(differences, version, "next", before, again) == [[]]


@pytest.mark.slow
def test_a_version_writes_a_checkpoint_of_every_mixer(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "FILES", tmp_path)
    write.main("9.9.9")
    with tarfile.open(tmp_path / "9.9.9.tar.xz") as archive:
        names = set(archive.getnames())
    assert {f"{name}-tp{tp}/.metadata" for name in MODELS for tp in RANKS} <= names
    with tarfile.open(tmp_path / "9.9.9-hf.tar.xz") as archive:
        names = set(archive.getnames())
    for name, kinds in KEPT.items():
        assert f"{folder_of(name)}/config.json" in names
        for kind in kinds:
            assert f"{folder_of(name)}-{kind}/release/.metadata" in names
