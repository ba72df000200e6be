"""The export command over damaged checkpoints and a full disk: one line, which names
the file."""

import resource
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_gdn.compat import untrusted_checkpoints
from megatron_gdn.compat.mixed_dtype_optimizers import restore_mixed_dtype_optimizers
from megatron_gdn.hf import export_folder, folders, import_folder, read_hf_config
from megatron_gdn.hf.__main__ import main
from megatron_gdn.hf.new_folder import new_folder
from megatron_gdn.hf.safetensors_files import SafetensorsFolder, compare_folders

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
    file = sorted(imported.glob("*.distcp"))[shard]
    stored = FileSystemReader(imported).read_metadata().storage_data.values()
    ends = [x.offset + x.length for x in stored if x.relative_path == file.name]
    assert max(ends) <= file.stat().st_size
    damage(file, how)
    said = assert_named(file, hf_folder("dense"), tmp_path, refused)
    if how in ("empty", "cut"):
        size = file.stat().st_size
        needed = min(end for end in ends if end > size)
        assert f" has {size} bytes, of {needed} or more that were written;" in said
    elif how == "zeros":
        assert " is damaged from byte 0 on;" in said


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["metadata.json", ".metadata"])
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "zeros"])
def test_a_checkpoint_with_a_damaged_table_is_named(
    imported, hf_folder, tmp_path, refused, name, how
):
    damage(imported / name, how)
    named = imported if (name, how) == ("metadata.json", "gone") else imported / name
    assert_named(named, hf_folder("dense"), tmp_path, refused)


ERROR_OF_CODE = TypeError("empty() got an unexpected keyword argument 'strides'")


@pytest.mark.parametrize(
    ("where", "raised"),
    [
        ("load_tensors_metadata", ERROR_OF_CODE),
        ("load", CheckpointException("", {0: (ERROR_OF_CODE, None)})),
    ],
)
def test_an_error_of_code_is_no_damaged_file(
    imported, hf_folder, tmp_path, monkeypatch, where, raised
):
    from megatron.core import dist_checkpointing

    def fail(*_):
        raise raised

    monkeypatch.setattr(dist_checkpointing, where, fail)
    with pytest.raises(TypeError, match="keyword argument 'strides'"):
        export_folder(imported, tmp_path / "back", hf_folder("dense"))
    assert not (tmp_path / "back").exists()


def test_metadata_of_torch_2_15_is_read_before_a_layer_is_built(
    imported, hf_folder, tmp_path, monkeypatch
):
    """Its tensors have strides, which megatron-core 0.19 gives to ``torch.empty``."""
    read = untrusted_checkpoints._read_metadata

    def with_strides(reader, *args):
        metadata = read(reader, *args)
        for tensor in metadata.state_dict_metadata.values():
            if isinstance(tensor, TensorStorageMetadata):
                vars(tensor.properties)["strides"] = (1,) * len(tensor.size)
        return metadata

    monkeypatch.setattr(untrusted_checkpoints, "_read_metadata", with_strides)
    restore_mixed_dtype_optimizers()
    export_folder(imported, tmp_path / "back", hf_folder("dense"))
    assert not list(compare_folders(hf_folder("dense"), tmp_path / "back"))


def write(folder: Path, checkpoint: Path, target: Path) -> None:
    with new_folder(target) as scratch:
        (scratch / "file").touch()


# What fails, the error, and a call of ``(folder, checkpoint, target)``.
FAULTS = {
    "a command": (
        "megatron_gdn.hf.folders.export_folder",
        KeyError,
        lambda *paths: main(export_command(*paths)),
    ),
    "JSON": (
        "megatron_gdn.hf.json_files.json.loads",
        KeyError,
        lambda folder, *_: read_hf_config(folder),
    ),
    "a file of weights": (
        "safetensors.safe_open",
        KeyError,
        lambda folder, *_: SafetensorsFolder(folder),
    ),
    "a rename": ("pathlib.Path.rename", KeyError, write),
    "a format": (
        "megatron_gdn.hf.folders._require_format",
        KeyError,
        lambda *paths: main(export_command(*paths)),
    ),
    "a table": (
        "megatron.core.dist_checkpointing.load_tensors_metadata",
        KeyboardInterrupt,
        lambda *paths: main(export_command(*paths)),
    ),
    "a description": (
        "megatron_gdn.hf.folders.FileSystemReader",
        KeyboardInterrupt,
        lambda folder, checkpoint, _: folders._describe_damage(checkpoint),
    ),
}


def export_command(folder: Path, checkpoint: Path, target: Path) -> list[str]:
    return ["export", str(checkpoint), str(target), "--like", str(folder)]


@pytest.mark.parametrize(("place", "error", "call"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_ours_and_an_interruption_are_no_damaged_file(
    imported, hf_folder, tmp_path, monkeypatch, place, error, call
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(place, fail)
    with pytest.raises(error):
        call(hf_folder("dense"), imported, tmp_path / "back")


def test_a_full_disk_is_named_by_the_folder_that_was_to_be_made(
    imported, hf_folder, tmp_path, refused
):
    """A limit on the size of files stands in for the disk."""
    back = tmp_path / "back"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
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


def assert_named(damaged: Path, like: Path, at: Path, refused) -> str:
    source = damaged if damaged.is_dir() else damaged.parent
    said = refused("export", source, at / "back", "--like", like)
    assert (
        f"{damaged} " in said and said.startswith("error: ") and said.count("\n") == 1
    ), said
    assert not (at / "back").exists()
    return said
