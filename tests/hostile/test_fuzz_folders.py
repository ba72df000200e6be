"""Random configs, headers, indexes and tables: an error of ours, soon, and nothing
outside.

Each example is a legal file with one change, or bytes. What is legal may pass; whatever
else happens must be an error that the command line prints.
"""

import copy
import json
import math
import os
import pickle
import shutil
import struct
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_gdn.compat.untrusted_checkpoints import untrusted_checkpoint
from megatron_gdn.hf.__main__ import main
from megatron_gdn.hf.safetensors_files import SafetensorsFolder, write_folder
from tests.hf.test_model_map import CONFIG
from tests.hostile.test_configs import EXPERTS, NEMOTRON
from tests.searches import examples

# seconds of the processor for one command; a busy machine may need more by the clock
LIMIT = 10
INDEX = "model.safetensors.index.json"
bounded = settings(
    max_examples=examples(60),
    deadline=timedelta(seconds=12 * LIMIT),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "../x.safetensors",
        "/tmp/x",
        "a\nb",
        "\x1b[2J",
        "4 --load X",
        "model.safetensors",
        "F64",
    ]
)
NUMBERS = st.sampled_from(
    [
        -1,
        0,
        1,
        2,
        3,
        7,
        2**31,
        2**63,
        2**64,
        10**19,
        -(2**63),
        0.5,
        math.nan,
        math.inf,
        1e308,
    ]
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=6,
)


def paths_of(value: object, above: tuple = ()) -> list[tuple]:
    """The places of all values within ``value``, as the keys that lead there."""
    keys = (
        value
        if isinstance(value, dict)
        else range(len(value) if isinstance(value, list) else 0)
    )
    places = [(*above, key) for key in keys]
    return places + [
        deeper for place in places for deeper in paths_of(value[place[-1]], place)
    ]


@st.composite
def changed(draw, base: dict):
    """``base`` with one value, at any depth, replaced, taken away or added."""
    whole = copy.deepcopy(base)
    *above, key = draw(st.sampled_from(paths_of(whole)))
    place = whole
    for step in above:
        place = place[step]
    value = draw(VALUES)
    how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    if how == "replace":
        place[key] = value
    elif how == "remove":
        del place[key]
    elif isinstance(place, dict):
        place[draw(TEXTS)] = value
    return whole


def content_of(value: object) -> bytes:
    return json.dumps(value).encode()


BASES = [CONFIG, CONFIG | EXPERTS, NEMOTRON, {"text_config": CONFIG} | CONFIG]
CONFIGS = st.one_of(*map(changed, BASES)).map(content_of)


@pytest.fixture
def says(capsys):
    """``says(*command)``: the exit code; an error is one line, which can be printed."""

    def run(*command: object) -> int:
        start = time.process_time()
        code = main([*map(str, command)])
        assert time.process_time() - start < LIMIT
        out, err = capsys.readouterr()
        assert code in (0, 1, 2)
        if code == 2:
            assert err.startswith("error: ") and err.count("\n") == 1, err
            assert err[:-1].isprintable() and len(err) < 2000, err
        assert all(line.isprintable() for line in out.splitlines())
        return code

    return run


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """Every file below ``folder`` with its content."""
    return {
        os.path.relpath(path, folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def two(tmp_path) -> tuple[Path, Path]:
    """A folder with two small files and their index, and a place for an export."""
    source = tmp_path / "inner" / "source"
    source.mkdir(parents=True)
    (tmp_path / "x.safetensors").write_bytes(small_file(HEADER))
    (tmp_path / "inner" / "x.safetensors").write_bytes(small_file(HEADER))
    return source, tmp_path / "inner" / "target"


HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
SECOND = {"c.weight": {"dtype": "I32", "shape": [8], "data_offsets": [0, 32]}}
TABLE = {
    "metadata": {"total_size": 64},
    "weight_map": {
        "a.weight": "model-1.safetensors",
        "b.weight": "model-1.safetensors",
        "c.weight": "model-2.safetensors",
    },
}


def small_file(header: object, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else content_of(header)
    return (
        struct.pack("<Q", len(text) if size is None else size) + text + bytes(range(32))
    )


def write_small(folder: Path, first: bytes, index: bytes) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(first)
    (folder / "model-2.safetensors").write_bytes(small_file(SECOND))
    (folder / INDEX).write_bytes(index)
    (folder / "config.json").write_bytes(content_of(CONFIG))


def exported(source: Path, target: Path) -> bool:
    """Write the folder's own weights into ``target``; whether that was done."""
    try:
        files = SafetensorsFolder(source)
        write_folder(target, files, files.read)
    except (ValueError, NotImplementedError, OSError) as error:
        assert str(error)
        return False
    return True


def attack(says, two, first: bytes, index: bytes) -> None:
    """Compare and export a folder of these files; only the target may be new."""
    source, target = two
    shutil.rmtree(target, ignore_errors=True)
    write_small(source, first, index)
    above = source.parent.parent
    before = tree_of(above)
    code = says("compare", source, source)
    assert says("flags", source) == 0
    assert tree_of(above) == before
    done = exported(source, target)
    assert done or code == 2
    after = tree_of(above)
    beside = {name: content for name, content in after.items() if "target" not in name}
    assert beside == before
    assert done == target.exists()
    if done:
        assert says("compare", source, target) == 0


@bounded
@given(content=CONFIGS | st.binary(max_size=40))
def test_any_config_gives_flags_or_an_error_of_ours(says, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    for model in ("hybrid", "gpt"):
        says("flags", tmp_path, "--model", model)


@bounded
@given(header=changed(HEADER).map(content_of) | st.binary(max_size=40))
def test_any_header_is_read_or_refused(says, two, header):
    attack(says, two, small_file(header), content_of(TABLE))


@bounded
@given(size=st.integers(0, 2**64 - 1), cut=st.integers(0, 200))
def test_any_length_of_a_header_and_of_a_file_is_read_or_refused(says, two, size, cut):
    attack(says, two, small_file(HEADER, size), content_of(TABLE))
    attack(says, two, small_file(HEADER)[:cut], content_of(TABLE))


@bounded
@given(index=changed(TABLE).map(content_of) | st.binary(max_size=40))
def test_any_index_is_read_or_refused(says, two, index):
    attack(says, two, small_file(HEADER), index)


def a_table() -> bytes:
    """The table of a distributed checkpoint with one tensor in two parts."""
    halves = [
        metadata.ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((2, 3)))
        for start in (0, 2)
    ]
    properties = metadata.TensorProperties(torch.bfloat16)
    entry = metadata.TensorStorageMetadata(properties, torch.Size((4, 3)), halves)
    places = {
        metadata.MetadataIndex("a", half.offsets, number): _StorageInfo(
            "__0_0.distcp", 12, 12
        )
        for number, half in enumerate(halves)
    }
    return pickle.dumps(metadata.Metadata({"a": entry}, None, places))


TABLE_BYTES = a_table()
PLACES = st.integers(0, len(TABLE_BYTES) - 1)


@bounded
@given(changes=st.dictionaries(PLACES, st.integers(0, 255), max_size=4), cut=PLACES)
def test_any_table_of_a_checkpoint_is_read_or_refused(tmp_path, changes, cut):
    content = bytearray(TABLE_BYTES)
    for place, byte in changes.items():
        content[place] = byte
    start = time.process_time()
    for written in (content, content[:cut]):
        (tmp_path / ".metadata").write_bytes(written)
        try:
            with untrusted_checkpoint():
                found = FileSystemReader(tmp_path).read_metadata()
        except (ValueError, pickle.UnpicklingError) as error:
            assert str(error)
        else:
            assert isinstance(found, metadata.Metadata)
    assert time.process_time() - start < LIMIT
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_a_legal_table_is_read_as_torch_reads_it(tmp_path):
    (tmp_path / ".metadata").write_bytes(TABLE_BYTES)
    reader = FileSystemReader(tmp_path)
    expected = reader.read_metadata()
    with untrusted_checkpoint():
        found = reader.read_metadata()
    assert found == expected


@pytest.mark.parametrize(
    "content",
    [{}, None, metadata.Metadata([], None, {}), metadata.Metadata({}, None, None)],
    ids=["a dict", "nothing", "no dict of tensors", "no dict of files"],
)
def test_what_is_no_table_is_refused_in_these_words(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with (
        pytest.raises(ValueError, match="is not a table of tensors and their files"),
        untrusted_checkpoint(),
    ):
        FileSystemReader(tmp_path).read_metadata()


def test_the_legal_files_pass(says, two, tmp_path):
    (tmp_path / ".metadata").write_bytes(TABLE_BYTES)
    with untrusted_checkpoint():
        assert "a" in FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    attack(says, two, small_file(HEADER), content_of(TABLE))
    assert two[1].exists()
