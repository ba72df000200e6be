"""A Hugging Face folder that nobody vouches for: nothing outside the target, no old
weights."""

import errno
import json
import os
import shutil
import stat
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from safetensors.torch import load_file, save_file

from megatron_gdn.compat.one_process import (
    end_one_process,
    in_one_process,
    start_one_process,
)
from megatron_gdn.hf import (
    export_folder,
    import_folder,
    megatron_model,
    save_hf_weights,
)
from megatron_gdn.hf.__main__ import main
from megatron_gdn.hf.new_folder import new_folder
from megatron_gdn.hf.safetensors_files import SafetensorsFolder, write_folder
from tests.ranks import on_ranks

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
A_LOG = "model.layers.0.linear_attn.A_log"


@pytest.fixture
def copy(hf_folder, tmp_path) -> Path:
    return shutil.copytree(hf_folder("dense"), tmp_path / "source")


@pytest.fixture(scope="module")
def imported(hf_folder, tmp_path_factory) -> Path:
    """An imported checkpoint; do not write into it."""
    target = tmp_path_factory.mktemp("imported") / "checkpoint"
    import_folder(hf_folder("dense"), target)
    return target


def edit_index(folder: Path, change) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_again(like: Path, target: Path) -> None:
    """An export of the folder's own weights."""
    source = SafetensorsFolder(like)
    write_folder(target, source, source.read)


# Names in an index


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "{there}",
        "sub/x.safetensors",
        "..",
        ".x.safetensors",
        "x\ny.safetensors",
        "sub\\x.safetensors",
        "",
        5,
        None,
        ["x"],
        "config.json",
    ],
)
def test_an_index_names_files_inside_the_folder(copy, tmp_path, refused, name):
    """The victim lies where the name leads, from the source as well as from the
    target."""
    victim = tmp_path / "x.safetensors"
    shutil.copy(copy / FIRST, victim)
    (copy / "sub").mkdir()
    before = victim.read_bytes(), victim.stat().st_mtime_ns
    named = name.format(there=victim) if isinstance(name, str) else name

    def redirect(index) -> None:
        files = index["weight_map"]
        index["weight_map"] = {k: named if f == FIRST else f for k, f in files.items()}

    edit_index(copy, redirect)
    (copy / FIRST).unlink()
    with pytest.raises(
        ValueError, match="names of .safetensors files inside the folder"
    ):
        write_again(copy, tmp_path / "back")
    assert f"{copy / INDEX} says that" in refused("compare", copy, copy)
    assert (victim.read_bytes(), victim.stat().st_mtime_ns) == before
    assert names_of(tmp_path) == ["source", "x.safetensors"]


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"null",
        b"5",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": 5}',
        b'{"metadata": null, "weight_map": {"x": "x.safetensors"}}',
        b"[" * 100_000,
        b'{"metadata": [], "weight_map": {"x": "x.safetensors"}}',
        b"\xff",
        b"",
        b'{"weight_map": {"x": "x.safetensors", "x": "y.safetensors"}}',
    ],
)
def test_an_index_of_another_form_is_refused_before_anything_is_written(
    copy, tmp_path, refused, content
):
    (copy / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=INDEX):
        write_again(copy, tmp_path / "back")
    said = refused("compare", copy, copy)
    assert str(copy / INDEX) in said and said.count("\n") == 1
    assert names_of(tmp_path) == ["source"]


# Headers


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            b'{"a":%s,"a":%s,"b":%s}'
            % (ENTRY % (0, 4), ENTRY % (4, 8), ENTRY % (0, 4)),
            "the key 'a' is listed twice",
        ),
        (b'{"a\\nb":%s,"b":%s}' % (ENTRY % (0, 4), ENTRY % (4, 8)), r"the key 'a\nb'"),
        (
            b'{"\\u001b[2J":%s,"b":%s}' % (ENTRY % (0, 4), ENTRY % (4, 8)),
            "printable characters",
        ),
        (
            b'{"%s":%s,"b":%s}' % (b"a" * 600, ENTRY % (0, 4), ENTRY % (4, 8)),
            "at most 512",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}',
            "a in ",
        ),
        (b"{}", "hold no tensor"),
        (b"[" * 100_000, "is truncated or not a safetensors file"),
    ],
)
def test_a_header_that_readers_may_take_differently_is_refused(
    tmp_path, refused, header, said
):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        data = (
            b""
            if b'"data_offsets":[0,0]' in header or header[:2] in (b"{}", b"[[")
            else bytes(8)
        )
        write_raw(tmp_path / name / "model.safetensors", header, data)
    text = refused("compare", tmp_path / "one", tmp_path / "two")
    assert said in text and text.count("\n") == 1


# Old weights


OLD = [
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    "model-00004-of-00004.safetensors",
    "model.fp16.safetensors",
]


@pytest.mark.parametrize("name", OLD)
def test_a_folder_with_two_sets_of_weights_is_refused(copy, tmp_path, refused, name):
    shutil.copy(copy / FIRST, copy / name)
    for command in (["compare", copy, copy], ["import", copy, tmp_path / "imported"]):
        assert f"{copy} has two sets of weights: {FIRST} and {name}" in refused(
            *command
        )
    with pytest.raises(ValueError, match="two sets of weights"):
        write_again(copy, tmp_path / "back")
    assert names_of(tmp_path) == ["source"]


def test_an_index_with_the_single_file_beside_others_is_refused(
    copy, tmp_path, refused
):
    """transformers would load the single file alone."""
    (copy / FIRST).rename(copy / "model.safetensors")

    def rename(index) -> None:
        files = index["weight_map"]
        index["weight_map"] = {
            key: "model.safetensors" if file == FIRST else file
            for key, file in files.items()
        }

    edit_index(copy, rename)
    assert "would load model.safetensors alone" in refused("compare", copy, copy)


def test_files_with_weights_and_pickles_are_not_copied(copy, tmp_path, caplog):
    kept = ["tokenizer.json", "sub/vocab.txt", "modeling.py"]
    left_out = [
        "checkpoint-5/model.safetensors",
        "training_args.bin",
        "optimizer.pt",
        "sub/old.PTH",
        "consolidated.safetensors",
        "model.gguf",
        "sub/pytorch_model.bin",
        "state.pkl",
    ]
    for name in [*kept, *left_out, ".hidden/x", ".hidden.json"]:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"old")
    (copy / "dangling.json").symlink_to("nothing.json")  # no file
    write_again(copy, tmp_path / "back")
    files = {
        str(p.relative_to(tmp_path / "back")) for p in (tmp_path / "back").rglob("*.*")
    }
    own = {path.name for path in copy.glob("model-*.safetensors")}
    configs = {path.name for path in copy.glob("*config.json")}
    assert files == {*kept, *own, *configs, INDEX}
    assert (
        "8 files of" in caplog.text and "the first is consolidated.saf" in caplog.text
    )


# Links


@pytest.mark.parametrize("name", ["notes.json", "config.json", INDEX, FIRST])
def test_a_link_is_not_followed_out_of_the_folder(
    copy, tmp_path, imported, refused, name
):
    """Not even to what the file itself would hold."""
    secret = tmp_path / "secret"
    if (copy / name).exists():
        (copy / name).rename(secret)
    else:
        secret.write_text("secret")
    (copy / name).symlink_to(secret)
    said = refused("export", imported, tmp_path / "back", "--like", copy)
    assert f"{copy / name} is a link out of the folder, to {secret}" in said
    assert names_of(tmp_path) == ["secret", "source"]


def test_a_link_is_refused_on_ranks_that_write_nothing(copy, tmp_path, monkeypatch):
    """They would wait for ever for the rank that writes."""
    secret = tmp_path / "secret.json"
    secret.write_text("secret")
    (copy / "notes.json").symlink_to(secret)
    monkeypatch.setattr(megatron_model, "_parallel_rank", lambda _: 1)
    with in_one_process(), pytest.raises(ValueError, match="is a link out of the fol"):
        save_hf_weights(torch.nn.Module(), tmp_path / "back", copy)


def test_a_linked_folder_is_not_copied(copy, tmp_path):
    (tmp_path / "secrets").mkdir()
    (copy / "notes").symlink_to(tmp_path / "secrets")
    with pytest.raises(ValueError, match="notes is a link to a folder"):
        write_again(copy, tmp_path / "back")
    assert names_of(tmp_path) == ["secrets", "source"]


def test_links_within_the_folder_and_the_hubs_cache_are_files(copy, tmp_path):
    """The hub's cache has snapshots/REVISION with links to files of ``blobs``."""
    blobs = tmp_path / "models--x" / "blobs"
    revision = tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted(copy.iterdir())):
        shutil.copy(path, blobs / str(number))
        (revision / path.name).symlink_to(f"../../blobs/{number}")
    (revision / "again.json").symlink_to("config.json")
    write_again(revision, tmp_path / "back")
    written = tmp_path / "back"
    assert names_of(written) == sorted([*names_of(copy), "again.json"])
    assert not any(path.is_symlink() for path in written.iterdir())
    assert (written / "again.json").read_bytes() == (copy / "config.json").read_bytes()


# NaN


def test_an_export_refuses_nan_as_an_import_does(copy, tmp_path, imported):
    from megatron_gdn.hf.folders import _load_checkpoint

    with in_one_process():
        model = _load_checkpoint(imported, copy)
        with torch.no_grad():
            model.decoder.layers[0].self_attention.A_log[3] = torch.nan
        with pytest.raises(
            ValueError, match=f"{A_LOG} holds 1 of 8 values that are NaN or inf"
        ):
            save_hf_weights(model, tmp_path / "back", copy)
    assert names_of(tmp_path) == ["source"]


# Targets


@pytest.mark.parametrize(
    "kind", ["a link to a folder", "a dangling link", "a link to a file"]
)
def test_a_target_that_is_a_link_is_refused_before_the_work(
    copy, tmp_path, refused, kind
):
    there = tmp_path / "there"
    if kind == "a link to a folder":
        there.mkdir()
    elif kind == "a link to a file":
        there.write_text("precious")
    target = tmp_path / "imported"
    target.symlink_to(there)
    assert f"{target} is a link to {there}" in refused("import", copy, target)
    assert target.is_symlink()
    assert not there.is_dir() or names_of(there) == []


def test_an_empty_folder_is_filled_and_stays_the_same_folder(copy, tmp_path):
    """It may be a mount point, which no rename replaces."""
    target = tmp_path / "back"
    target.mkdir(mode=0o700)
    before = target.stat()
    write_again(copy, target)
    after = target.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert names_of(target) == names_of(copy)


def test_an_error_leaves_an_empty_folder_as_it_was(copy, tmp_path):
    target = tmp_path / "back"
    target.mkdir()
    with pytest.raises(OSError, match="disk"), new_folder(target) as folder:
        (folder / "file").write_text("x")
        raise OSError("disk")
    assert names_of(target) == []


def test_an_error_is_told_also_if_the_scratch_folder_cannot_be_deleted(tmp_path):
    with pytest.raises(ValueError, match="first"), new_folder(tmp_path / "x") as folder:
        folder.rmdir()
        raise ValueError("first")


def test_what_was_written_is_kept_when_the_target_cannot_be_made(tmp_path, monkeypatch):
    target = tmp_path / "back"

    def refuse(self, target):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    complete = pytest.raises(FileExistsError, match="The complete files are in")
    with complete as caught, new_folder(target) as folder:
        (folder / "file").write_text("hours of work")
        monkeypatch.setattr(Path, "rename", refuse)
    assert (folder / "file").read_text() == "hours of work"
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("fills", [False, True])
def test_a_target_that_another_process_fills_meanwhile_is_not_touched(tmp_path, fills):
    target = tmp_path / "back"
    if fills:
        target.mkdir()
    complete = pytest.raises(FileExistsError, match="The complete files are in")
    with complete, new_folder(target) as folder:
        (folder / "file").write_text("ours")
        target.mkdir(exist_ok=True)
        (target / "file").write_text("theirs")
    assert (target / "file").read_text() == "theirs"
    assert (folder / "file").read_text() == "ours"


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o755), (0o027, 0o750), (0o077, 0o700)]
)
def test_a_new_folder_has_the_permissions_of_the_users_umask(
    copy, tmp_path, umask, mode
):
    before = os.umask(umask)
    try:
        write_again(copy, tmp_path / "back")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "back").stat().st_mode) == mode
    files = [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "back").iterdir()
    ]
    assert all(found & umask == 0 for found in files)


# Reports


def test_a_name_makes_no_line_of_a_report(copy, tmp_path, capsys):
    other = tmp_path / "x\nevery tensor is equal\x1b[2J"
    shutil.copytree(copy, other)
    tensors = load_file(copy / FIRST)
    missing = sorted(tensors)[0]
    del tensors[missing]
    save_file(tensors, copy / FIRST)
    edit_index(copy, lambda index: index["weight_map"].pop(missing))
    assert main(["compare", str(copy), str(other)]) == 1
    assert main(["compare", str(other), str(copy)]) == 1
    line = rf"{missing}: only in {tmp_path}/x\nevery tensor is equal\x1b[2J"
    assert capsys.readouterr().out.splitlines() == [line, "1 tensors differ"] * 2
    assert main(["flags", f"{other}\n"]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "\x1b" not in said
        and r"x\nevery tensor is equal" in said
    )


def test_an_export_of_the_command_line_names_what_a_name_would_hide(
    copy, tmp_path, refused
):
    target = tmp_path / "x\nerror: none"
    target.mkdir()
    (target / "file").touch()
    said = refused("import", copy, target)
    assert (
        said
        == rf"error: {tmp_path}/x\nerror: none exists; remove it or choose another name."
        "\n"
    )


def test_an_export_still_gives_the_folder_back(
    imported, hf_folder, tmp_path, monkeypatch
):
    """One rank gathers nothing, which would copy every weight."""
    monkeypatch.setattr(dist, "all_gather", None)
    export_folder(imported, tmp_path / "back", like=hf_folder("dense"))
    assert main(["compare", str(hf_folder("dense")), str(tmp_path / "back")]) == 0


@on_ranks(tp=1)
def test_a_megatron_that_is_set_up_already_is_left_as_it_is():
    group = parallel_state.get_tensor_model_parallel_group()
    with in_one_process():
        assert parallel_state.get_tensor_model_parallel_group() is group
    assert parallel_state.get_tensor_model_parallel_group() is group


@pytest.mark.parametrize("error", [None, KeyError("inside")], ids=["done", "error"])
def test_a_megatron_that_was_set_up_for_a_folder_is_gone_after_it(error):
    before = torch.get_rng_state()
    with suppress(KeyError), in_one_process():
        assert parallel_state.model_parallel_is_initialized()
        torch.rand(1)
        if error:
            raise error
    assert not parallel_state.model_parallel_is_initialized()
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before)


def test_one_process_is_set_up_once_and_draws_by_its_seed():
    drawn = []
    with torch.random.fork_rng():
        for seed in (7, 7, 8):
            device = start_one_process(seed)
            with tensor_parallel.get_cuda_rng_tracker().fork():
                drawn.append(torch.rand(3, device=device))
            with pytest.raises(RuntimeError, match="initialised already, with 1 proc"):
                start_one_process(seed)
            end_one_process()
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
