"""Lock files of kernels in a cache folder that other users may write to."""

import fcntl
import os
import time

import pytest

from megatron_gdn.gdn.flash_qla import builds as flash_qla_builds
from megatron_gdn.ops.kernels import builds
from megatron_gdn.ops.kernels.builds import build_lock, lock_file

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "megatron_gdn" / "kernel-0123.lock"


def precious(tmp_path):
    """A file of the user that nobody may change."""
    made = tmp_path / "precious"
    made.write_text("twenty years of work")
    return made


def test_a_lock_is_in_a_folder_of_its_user(path):
    with build_lock(path, "k") as lock:
        assert lock is not None
    own = lock_file(path)
    assert own.is_file() and str(os.geteuid()) in own.parent.name
    assert own.parent.stat().st_mode & 0o077 == 0 and own.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["path", "lock_file"])
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
def test_no_link_in_the_place_of_a_lock_is_followed(
    place, link, path, tmp_path, caplog
):
    file = precious(tmp_path)
    target = path if place == "path" else lock_file(path)
    target.parent.mkdir(parents=True, mode=0o700)
    link(file, target)
    with build_lock(path, "k") as lock:
        assert (lock is None) == (place == "lock_file")
    assert file.read_text() == "twenty years of work"
    assert ("every process compiles" in caplog.text) == (place == "lock_file")


def test_a_link_in_the_place_of_the_users_folder_is_not_followed(path, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path.parent.mkdir()
    lock_file(path).parent.symlink_to(elsewhere)
    with build_lock(path, "k") as lock:
        assert lock is None
    assert not list(elsewhere.iterdir())


def test_a_dangling_link_in_the_place_of_the_users_folder_makes_no_folder(
    path, tmp_path
):
    path.parent.mkdir()
    lock_file(path).parent.symlink_to(tmp_path / "made")
    with build_lock(path, "k") as lock:
        assert lock is None
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("which", ["folder", "file"])
def test_a_file_of_another_owner_is_not_taken(which, path, monkeypatch, caplog):
    own = lock_file(path)
    with build_lock(path, "k"):
        pass
    own.write_text("not mine")
    place = own.parent if which == "folder" else own
    inode = place.stat().st_ino
    status_of = os.fstat

    def of_another(descriptor):
        status = status_of(descriptor)
        fields = list(status)
        if status.st_ino == inode:
            fields[4] = os.geteuid() + 1  # st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(builds.os, "fstat", of_another)
    with build_lock(path, "k") as lock:
        assert lock is None
    assert own.read_text() == "not mine"
    assert f"belongs to user {os.geteuid() + 1}" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_ordinary_file_is_not_taken(kind, path):
    own = lock_file(path)
    own.parent.mkdir(parents=True, mode=0o700)
    os.mkfifo(own) if kind == "fifo" else own.mkdir()
    with build_lock(path, "k") as lock:
        assert lock is None


@pytest.mark.parametrize("place", ["free", "held", "linked", "no folder"])
def test_no_descriptor_stays_open(place, path, tmp_path, request):
    """A run compiles many kernels; a process may have some thousand descriptors."""
    own = lock_file(path)
    if place == "held":
        request.getfixturevalue("held")
    elif place == "linked":
        own.parent.mkdir(parents=True, mode=0o700)
        os.link(precious(tmp_path), own)
    elif place == "no folder":
        path.parent.mkdir()
        own.parent.touch()

    def opened():
        numbers = os.listdir("/proc/self/fd")
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in numbers]
        return sorted(file for file in files if file.startswith(str(tmp_path)))

    before = opened()
    with build_lock(path, "k", longest_wait=0.1):
        pass
    assert opened() == before


def test_a_cache_that_cannot_be_written_needs_no_lock(tmp_path):
    (tmp_path / "file").touch()
    with build_lock(tmp_path / "file" / "k.lock", "k") as lock:
        assert lock is None


@pytest.fixture
def held(path):
    """The lock, held by a descriptor that never lets go."""
    with build_lock(path, "k"):
        pass
    file = os.open(lock_file(path), os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    yield lock_file(path)
    os.close(file)


def test_nobody_waits_without_end(held, path, caplog):
    began = time.monotonic()
    with build_lock(path, "kernel k", longest_wait=0.3) as lock:
        assert lock is None
    assert 0.2 < time.monotonic() - began < 10
    assert "kernel k" in caplog.text and "this process compiles it too" in caplog.text
    assert builds._LONGEST_WAIT <= 3600


@pytest.mark.parametrize(
    "text",
    [
        "process 1\nERROR: all is lost",
        "process 1 on \x1b[31mred",
        "process 999999999 on {host}",
        "process 1",
        "\x00" * 100,
        "",
        "process 1 on another-host",
    ],
)
def test_a_waiting_process_is_told_no_text_and_no_process_that_ended(
    text, held, path, caplog
):
    held.write_text(text.format(host=builds._host()))
    with build_lock(path, "k", longest_wait=0.2):
        pass
    assert "compiled by another process" in caplog.text
    assert all(len(record.getMessage().splitlines()) == 1 for record in caplog.records)


def test_a_waiting_process_is_told_who_holds_the_lock(held, path, caplog):
    held.write_text(f"process {os.getpid()} on {builds._host()}")
    with build_lock(path, "k", longest_wait=0.2):
        pass
    assert f"compiled by process {os.getpid()}" in caplog.text


def test_a_kernel_is_not_remembered_through_a_link(tmp_path):
    entry = tmp_path / "cache" / "kernel-digest"
    elsewhere = tmp_path / "made"
    entry.parent.mkdir()
    entry.symlink_to(elsewhere)
    compiled = type("Compiled", (), {"_tilelang_cache_path": str(tmp_path)})()
    flash_qla_builds.mark_as_cached(entry, compiled)
    assert not elsewhere.exists()
    entry.unlink()
    flash_qla_builds.mark_as_cached(entry, compiled)
    assert entry.is_file() and not entry.is_symlink()
