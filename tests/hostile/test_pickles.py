"""A checkpoint that nobody vouches for: an export reads it, and runs no code of it."""

import io
import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
)

from megatron_gdn.fp32_masters import load_fp32_masters
from megatron_gdn.hf import import_folder
from megatron_gdn.hf.folders import find_checkpoint
from tests.processes import ROOT

EMBEDDING = "embedding.word_embeddings.weight"


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def clean(hf_folder, tmp_path_factory) -> Path:
    """An imported checkpoint; do not write into it."""
    target = tmp_path_factory.mktemp("clean") / "imported"
    import_folder(hf_folder("dense"), target)
    return target


@pytest.fixture
def checkpoint(clean, tmp_path) -> Path:
    return shutil.copytree(clean, tmp_path / "imported")


@pytest.fixture
def refusal(checkpoint, tmp_path, hf_folder, refused):
    """``refusal()``: what an export of ``checkpoint`` says; it leaves nothing."""

    def said() -> str:
        back = tmp_path / "back"
        text = refused("export", checkpoint, back, "--like", hf_folder("dense"))
        assert not (tmp_path / "mark").exists(), "the export ran code of the checkpoint"
        assert not back.exists()
        assert text.startswith("error: ") and text.count("\n") == 1
        return text

    return said


def change(checkpoint: Path, how) -> None:
    """Apply ``how(metadata)`` to the checkpoint's table, which is trusted here."""
    path = checkpoint / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))


def plant_object(checkpoint: Path, name: str, content: object) -> None:
    """Let the entry ``name`` of the table be an object, ``content``, in the files of
    tensors."""
    buffer = io.BytesIO()
    torch.save(content, buffer)

    def redirect(metadata) -> None:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        [index] = [one for one in metadata.storage_data if one.fqn == name][:1]
        info = metadata.storage_data[index]
        file = checkpoint / "release" / info.relative_path
        metadata.storage_data[index] = replace(
            info, offset=file.stat().st_size, length=len(buffer.getvalue())
        )
        with file.open("ab") as stream:
            stream.write(buffer.getvalue())

    change(checkpoint, redirect)


class PlantedOfTorch(Planted):
    """Calls a function of torch, from which a table takes dtypes alone."""

    def __reduce__(self):
        return torch.typename, (5,)


@pytest.mark.parametrize(
    ("kind", "said"), [(Planted, "posix.mkdir"), (PlantedOfTorch, "torch.typename")]
)
@pytest.mark.parametrize("where", ["whole", "within"])
def test_a_table_that_is_a_pickle_of_code_is_not_run(
    checkpoint, tmp_path, refusal, where, kind, said
):
    planted = kind(tmp_path / "mark")
    if where == "whole":
        (checkpoint / "release" / ".metadata").write_bytes(pickle.dumps(planted))
    else:
        change(checkpoint, lambda metadata: setattr(metadata, "planner_data", planted))
    assert f"its pickles load {said}, which no checkpoint needs" in refusal()


class Model(nn.Module):
    """A model without weights."""

    def sharded_state_dict(self, **_) -> dict:
        return {}


def load_masters(folder: Path) -> None:
    load_fp32_masters(Model(), folder)


def load_pretrained(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from pretraining import hf_model
    finally:
        sys.path.pop(0)
    hf_model.load_pretrained(folder, SimpleNamespace(model=Model()))


def plant_beside(checkpoint: Path, content: object) -> None:
    """Let ``content`` be the object beside the tensors, in which Megatron keeps
    arguments and more; torch loads it with any class."""
    table = pickle.loads((checkpoint / "release" / ".metadata").read_bytes())
    [name] = [
        key for key in table.state_dict_metadata if key.startswith("common_state")
    ]
    plant_object(checkpoint, name, content)


each_reader = pytest.mark.parametrize("load", [load_masters, load_pretrained])


@pytest.mark.parametrize("where", ["table", "object"])
@each_reader
def test_other_functions_that_read_a_checkpoint_run_no_code_of_it(
    checkpoint, tmp_path, load, where
):
    planted = Planted(tmp_path / "mark")
    if where == "table":
        (checkpoint / "release" / ".metadata").write_bytes(pickle.dumps(planted))
    else:
        plant_beside(checkpoint, planted)
    (checkpoint / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ValueError, match=r"refused: its pickles load posix\.mkdir"):
        load(checkpoint / "release")
    assert not planted.mark.exists()


@each_reader
def test_an_error_about_a_folder_is_no_refusal_whatever_its_name(checkpoint, load):
    """torch's error about a class in a pickle has the word GLOBAL, too."""
    folder = (checkpoint / "release").rename(checkpoint / "GLOBAL run")
    (folder / "metadata.json").unlink()
    with pytest.raises(Exception, match="GLOBAL run") as raised:
        load(folder)
    assert "pickles" not in str(raised.value)


def test_the_object_beside_the_tensors_is_not_run(checkpoint, tmp_path, refusal):
    plant_beside(checkpoint, [Planted(tmp_path / "mark")])
    assert "posix.mkdir" in refusal()


def test_the_file_of_older_versions_is_not_run(
    checkpoint, tmp_path, refusal, monkeypatch
):
    """A user's variable lets torch load any class."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(
        {"args": Planted(tmp_path / "mark")}, checkpoint / "release" / "common.pt"
    )
    assert "posix.mkdir" in refusal()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


def test_a_weight_that_is_an_object_is_not_run(checkpoint, tmp_path, refusal):
    plant_object(checkpoint, EMBEDDING, Planted(tmp_path / "mark"))
    assert f"the checkpoint has no {EMBEDDING}" in refusal()


@pytest.mark.parametrize(
    "name", ["../other/release", "{there}", "..", "release/../release", "x\ny"]
)
def test_a_tracker_names_an_iteration_and_no_path(
    checkpoint, clean, tmp_path, refusal, name
):
    shutil.copytree(clean, tmp_path / "other")
    named = name.format(there=tmp_path / "other" / "release")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(named)
    assert "legal are the number of an iteration, or 'release'" in refusal()


@pytest.mark.parametrize(
    ("content", "name"),
    [("release", "release"), ("160", "iter_0000160"), ("160\n", "iter_0000160")],
)
def test_a_legal_tracker_names_its_folder(tmp_path, content, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "metadata.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    assert find_checkpoint(tmp_path) == tmp_path / name


@pytest.mark.parametrize("name", ["../other.distcp", "{there}", "", 5])
def test_a_table_names_files_inside_the_folder(checkpoint, tmp_path, refusal, name):
    release = checkpoint / "release"
    first = sorted(release.glob("*.distcp"))[0]
    shutil.copy(first, checkpoint / "other.distcp")
    named = (
        name.format(there=checkpoint / "other.distcp")
        if isinstance(name, str)
        else name
    )

    def redirect(metadata) -> None:
        for index, info in metadata.storage_data.items():
            if info.relative_path == first.name:
                metadata.storage_data[index] = replace(info, relative_path=named)

    change(checkpoint, redirect)
    assert "legal are names inside the folder" in refusal()


def test_a_tensor_with_a_missing_part_is_refused(checkpoint, refusal):
    """torch reads the parts that the table lists, and leaves the rest of the memory as
    it is."""
    change(
        checkpoint,
        lambda metadata: metadata.state_dict_metadata[EMBEDDING].chunks.clear(),
    )
    assert f"has 0 of 1608 values of {EMBEDDING} in 0 parts" in refusal()


def test_a_tensor_with_a_part_twice_is_refused(checkpoint, refusal):
    """In place of another part: the values add up, and rows are missing."""

    def halve(metadata) -> None:
        tensor = metadata.state_dict_metadata[EMBEDDING]
        (whole,) = tensor.chunks
        half = ChunkStorageMetadata(whole.offsets, torch.Size((67, 12)))
        tensor.chunks[:] = [half, half]

    change(checkpoint, halve)
    assert f"has 1608 of 1608 values of {EMBEDDING} in 1 parts" in refusal()


def strange(metadata) -> dict:
    """Changes of a table after which torch or Megatron would fail in a way of their
    own."""
    tensor = metadata.state_dict_metadata[EMBEDDING]
    [index, info] = next(iter(metadata.storage_data.items()))
    part = tensor.chunks[0]
    bare = ChunkStorageMetadata.__new__(ChunkStorageMetadata)  # without its fields

    def other(**fields) -> BytesStorageMetadata:
        """Of a legal class, with fields of another."""
        made = BytesStorageMetadata()
        vars(made).update(fields)
        return made

    return {
        "no table": lambda: setattr(metadata, "state_dict_metadata", None),
        "no places": lambda: setattr(metadata, "storage_data", [1]),
        "a key": lambda: metadata.state_dict_metadata.update({5: tensor}),
        "an entry": lambda: metadata.state_dict_metadata.update({EMBEDDING: "x"}),
        "a size": lambda: setattr(tensor, "size", (67, 24)),
        "a size below 0": lambda: setattr(tensor, "size", torch.Size((-1, 24))),
        "a dtype": lambda: setattr(tensor.properties, "dtype", "bfloat16"),
        "properties": lambda: setattr(tensor, "properties", 5),
        "no dtype": lambda: setattr(tensor, "properties", other(pin_memory=False)),
        "a property": lambda: setattr(
            metadata, "state_dict_metadata", {EMBEDDING: index}
        ),
        "an unknown property": lambda: setattr(
            tensor, "properties", other(dtype=torch.bfloat16, out=None)
        ),
        "a layout": lambda: setattr(tensor.properties, "layout", 5),
        "a need of gradients": lambda: setattr(tensor.properties, "requires_grad", "x"),
        "a pin": lambda: setattr(tensor.properties, "pin_memory", "x"),
        "parts": lambda: setattr(tensor, "chunks", None),
        "a part": lambda: setattr(part, "offsets", torch.Size((5, 5))),
        "a part without fields": lambda: setattr(tensor, "chunks", [bare]),
        "a part of another class": lambda: setattr(
            tensor, "chunks", [other(**vars(part))]
        ),
        "a part's dims": lambda: setattr(part, "sizes", torch.Size((5,))),
        "a part's size": lambda: setattr(part, "sizes", tuple(part.sizes)),
        "a part's size below 0": lambda: setattr(part, "sizes", torch.Size((-1, 24))),
        "a part's start": lambda: setattr(part, "offsets", tuple(part.offsets)),
        "a part's start below 0": lambda: setattr(part, "offsets", torch.Size((-1, 0))),
        "an offset": lambda: metadata.storage_data.update(
            {index: replace(info, offset="x")}
        ),
        "a length": lambda: metadata.storage_data.update(
            {index: replace(info, length=-1)}
        ),
        "a place": lambda: metadata.storage_data.update({index: other(**vars(info))}),
        "an index": lambda: metadata.storage_data.update({"x": info}),
        "an index's name": lambda: metadata.storage_data.update(
            {replace(index, fqn=5): info}
        ),
    }


NO_TABLE = "is not a table of tensors and their files"
NO_ENTRY = f"has an entry '{EMBEDDING}' that is neither a tensor nor an object"
NO_PLACE = "has an invalid place in __0_"
# What is said of each change.
STRANGE = {
    "no table": NO_TABLE,
    "no places": NO_TABLE,
    "a key": "has an entry 5 that is neither a tensor nor an object",
    "an entry": NO_ENTRY,
    "a size": NO_ENTRY,
    "a size below 0": NO_ENTRY,
    "a dtype": NO_ENTRY,
    "properties": NO_ENTRY,
    "no dtype": NO_ENTRY,
    "a property": NO_ENTRY,
    "an unknown property": NO_ENTRY,
    "a layout": NO_ENTRY,
    "a need of gradients": NO_ENTRY,
    "a pin": NO_ENTRY,
    "parts": NO_ENTRY,
    "a part": NO_ENTRY,
    "a part without fields": "has an object without one of its fields: ",
    "a part of another class": NO_ENTRY,
    "a part's dims": NO_ENTRY,
    "a part's size": NO_ENTRY,
    "a part's size below 0": NO_ENTRY,
    "a part's start": NO_ENTRY,
    "a part's start below 0": NO_ENTRY,
    "an offset": NO_PLACE,
    "a length": NO_PLACE,
    "a place": NO_PLACE,
    "an index": NO_PLACE,
    "an index's name": NO_PLACE,
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_table_of_another_form_is_refused(checkpoint, refusal, what):
    change(checkpoint, lambda metadata: strange(metadata)[what]())
    said = refusal()
    assert f"{checkpoint / 'release' / '.metadata'} is missing or damaged" in said
    assert STRANGE[what] in said


def test_a_weight_of_whole_numbers_is_refused(checkpoint, refusal):
    def retype(metadata) -> None:
        metadata.state_dict_metadata[EMBEDDING].properties.dtype = torch.int64

    change(checkpoint, retype)
    assert f"{EMBEDDING} has dtype torch.int64" in refusal()


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b'{"sharded_backend": 5}', b"[" * 100_000, b"null", b"\xff"],
)
def test_a_format_of_another_form_is_refused(checkpoint, refusal, content):
    path = checkpoint / "release" / "metadata.json"
    path.write_bytes(content)
    assert f"{path} is damaged" in refusal()


@pytest.mark.parametrize("state", [5, [], [5], ["x"], None])
def test_a_state_beside_the_tensors_of_another_form_is_refused(
    checkpoint, refusal, state
):
    plant_beside(checkpoint, state)
    assert "the state beside its tensors" in refusal()


@pytest.mark.parametrize("shape", [(), (67,), (10**6, 10**6)])
def test_a_shape_of_another_model_is_refused(checkpoint, refusal, shape):
    def reshape(metadata) -> None:
        metadata.state_dict_metadata[EMBEDDING].size = torch.Size(shape)

    change(checkpoint, reshape)
    text = refusal()
    assert (
        f"{EMBEDDING} has shape {shape}" in text
        or ".metadata is missing or damaged" in text
    )
