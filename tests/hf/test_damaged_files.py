"""The export command over damaged checkpoints and a full disk: one line, which names the folder."""

import resource
from pathlib import Path

import pytest

from megatron_gdn.hf import import_folder
from megatron_gdn.hf.__main__ import main

# The last as a crash of the machine leaves a file whose last blocks were not written.
DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "zeros at its end": lambda content: content[:-4096].ljust(len(content), b"\0"),
}


def damage(file: Path, how: str) -> None:
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(DAMAGE[how](file.read_bytes()))


@pytest.mark.each_value
@pytest.mark.parametrize("shard", [0, -1], ids=["first shard", "last shard"])
@pytest.mark.parametrize("how", ["gone", *DAMAGE])
def test_a_checkpoint_with_a_damaged_shard_is_named(
    imported, hf_folder, tmp_path, refused, shard, how
):
    damage(sorted(imported.glob("*.distcp"))[shard], how)
    assert_named(imported, hf_folder("dense"), tmp_path, refused)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["metadata.json", ".metadata"])
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "zeros"])
def test_a_checkpoint_with_a_damaged_table_is_named(
    imported, hf_folder, tmp_path, refused, name, how
):
    damage(imported / name, how)
    assert_named(imported, hf_folder("dense"), tmp_path, refused)


def test_a_fault_of_ours_keeps_its_traceback(imported, hf_folder, tmp_path, monkeypatch):
    command = ["export", str(imported), str(tmp_path), "--like", str(hf_folder("dense"))]
    monkeypatch.setattr("megatron_gdn.hf.folders.export_folder", lambda *a, **k: {}["a bug"])
    with pytest.raises(KeyError):
        main(command)


def test_a_full_disk_is_named_by_the_folder_that_was_to_be_made(
    imported, hf_folder, tmp_path, refused
):
    """A limit on the size of files stands in for the disk."""
    back, (soft, hard) = tmp_path / "back", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        said = refused("export", imported, back, "--like", hf_folder("dense"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and str(back) in said and "File too large" in lines[0], said
    assert not back.exists()


@pytest.fixture
def imported(hf_folder, tmp_path) -> Path:
    import_folder(hf_folder("dense"), tmp_path / "imported")
    return tmp_path / "imported" / "release"


def assert_named(source: Path, like: Path, at: Path, refused) -> None:
    said = refused("export", source, at / "back", "--like", like)
    assert f"{source} " in said and said.startswith("error: ") and said.count("\n") == 1, said
    assert not (at / "back").exists()
