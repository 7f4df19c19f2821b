from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

from infra.contracts.errors import StorageError
from infra.storage.local_store import LocalStore
from tests.contracts.object_store_contract import RACERS, ObjectStoreContract, StoreMachine


class TestLocalStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "run")


class LocalMachine(StoreMachine):
    def make_store(self) -> LocalStore:
        self.folder = tempfile.mkdtemp()
        return LocalStore(self.folder)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


LocalMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestAgainstMemory = LocalMachine.TestCase


def _create(arguments: tuple[str, str, int]) -> bool:
    root, key, number = arguments
    return LocalStore(root).create(key, b"%d" % number)


def _add(arguments: tuple[str, int]) -> None:
    store = LocalStore(arguments[0])
    for _ in range(arguments[1]):
        while True:
            data, token = store.read_with_token("count") or (b"0", None)
            if store.compare_and_swap("count", b"%d" % (int(data) + 1), token):
                break


def test_processes_race(tmp_path):
    """One creator wins, and counting by compare-and-swap loses nothing."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, mp_context=context) as pool:
        for round_ in range(10):
            items = [(str(tmp_path), f"r{round_}/key", i) for i in range(RACERS)]
            won = list(pool.map(_create, items))
            assert sum(won) == 1
            assert LocalStore(tmp_path).read(f"r{round_}/key") == b"%d" % won.index(True)
        list(pool.map(_add, [(str(tmp_path), 10)] * 4))
    assert LocalStore(tmp_path).read("count") == b"40"


WRITER = """
import os, signal, sys
from infra.storage.local_store import LocalStore

def pieces():
    yield b"x" * 1000
    os.kill(os.getpid(), signal.SIGKILL)
    yield b"never"

LocalStore(sys.argv[1]).create("weights/v1/part", pieces())
"""


def test_a_killed_writer_leaves_nothing_that_shows(tmp_path):
    killed = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "weights" / "v1"
    assert len(list(folder.iterdir())) == 1, "the kill came while it was writing"
    store = LocalStore(tmp_path)
    assert store.list_after("") == [] and store.list_folders("") == []
    assert store.read_with_token("weights/v1/part") is None
    assert store.create("weights/v1/part", b"whole")
    assert [p.name for p in folder.iterdir()] == ["part"], "the left-over file is swept"


def test_a_live_writer_is_not_swept(tmp_path):
    def pieces():
        yield b"ab"
        assert LocalStore(tmp_path).create("a/other", b"x")
        yield b"cd"

    store = LocalStore(tmp_path)
    assert store.create("a/key", pieces())
    assert store.read("a/key") == b"abcd"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["key", "other"]


def test_the_loser_of_a_race_keeps_the_winners_bytes(tmp_path):
    def pieces():
        assert LocalStore(tmp_path).create("a/key", b"winner")
        yield b"loser"

    assert not LocalStore(tmp_path).create("a/key", pieces())
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["key"]
    assert LocalStore(tmp_path).read("a/key") == b"winner"


def test_files_are_readable_by_others(tmp_path):
    store = LocalStore(tmp_path)
    old = os.umask(0o022)
    try:
        store.create("a", b"x")
        store.compare_and_swap("a", b"y", store.read_with_token("a")[1])
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_large_objects_are_synced_as_they_go(tmp_path):
    piece = memoryview(bytes(range(256)) * 4096)
    assert LocalStore(tmp_path).create("a", [piece] * 130)
    view = LocalStore(tmp_path).view("a")
    assert len(view) == 130 * len(piece)
    assert view[-len(piece) :] == piece and view[: len(piece)] == piece


def test_a_disk_that_refuses_is_named(tmp_path):
    """A limit on file sizes stands for a full disk: the write fails half-way."""
    store = LocalStore(tmp_path)
    token = store.compare_and_swap("a/state", b"old", None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"a/big: cannot write: .*; raise the limit"):
            store.create("a/big", [b"x" * 8_000] * 3)
        with pytest.raises(StorageError, match=r"a/state: cannot write: .*; raise the limit"):
            store.compare_and_swap("a/state", b"y" * 20_000, token)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["state"]
    assert store.read_with_token("a/state") == (b"old", token)


def test_a_root_that_is_a_file_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="run/a: cannot write: Not a directory; check"):
        LocalStore(tmp_path / "run").create("a", b"x")


def test_a_root_that_leads_nowhere_ends(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match="vanishes"):
        LocalStore(tmp_path / "run").create("a", b"x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_are_named(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(StorageError, match="a: cannot write: Permission denied; check who may"):
        LocalStore(tmp_path).create("a", b"x")


def test_names_too_long_are_named(tmp_path):
    with pytest.raises(StorageError, match="File name too long; use a shorter name"):
        LocalStore(tmp_path).create("a" * 300, b"x")
