"""Folders in a store: complete or not there, whatever was left by a copy that was broken off."""

import pytest

from infra.contracts.errors import DamagedObject
from infra.storage.folder_copy import (
    MARKER,
    copied_folder,
    delete_folder,
    download_folder,
    upload_folder,
)
from infra.storage.memory_store import MemoryStore

FILES = {"a": b"1", "deep/er/b": b"22" * 1000, "empty": b""}


class Cut(MemoryStore):
    """Fails at the n-th creation."""

    left = 10**6

    def create(self, key, data, *, durable=True):
        self.left -= 1
        if self.left < 0:
            raise OSError("cut off")
        return super().create(key, data, durable=durable)


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_there_and_back(tmp_path):
    store = MemoryStore()
    assert not download_folder(store, "init", tmp_path / "back")
    upload_folder(store, "init", write(tmp_path / "there", FILES))
    write(tmp_path / "back", {"a": b"0", "deep/stray": b"of an older copy"})
    assert download_folder(store, "init", tmp_path / "back")
    assert read(tmp_path / "back") == FILES


@pytest.mark.parametrize("calls", range(len(FILES) + 1))
def test_a_copy_that_is_broken_off_is_invisible_and_is_made_anew(tmp_path, calls):
    store = Cut()
    store.left = calls
    with pytest.raises(OSError, match="cut off"):
        upload_folder(store, "c/1", write(tmp_path / "first", FILES))
    assert copied_folder(store, "c/1") is None
    store.left = 10**6
    other = {**FILES, "a": b"another"}
    upload_folder(store, "c/1", write(tmp_path / "second", other))
    assert download_folder(store, "c/1", tmp_path / "back") and read(tmp_path / "back") == other


def test_a_complete_copy_never_changes(tmp_path):
    store = MemoryStore()
    first = upload_folder(store, "c/1", write(tmp_path / "first", FILES))
    assert upload_folder(store, "c/1", write(tmp_path / "second", {"z": b"z"})) == first
    delete_folder(store, "c/1")
    assert store.list_after("") == []


def test_a_folder_that_went_away_is_said_and_leaves_nothing_visible(tmp_path):
    store = MemoryStore()
    with pytest.raises(FileNotFoundError):
        upload_folder(store, "c/1", tmp_path / "none")
    assert copied_folder(store, "c/1") is None


@pytest.mark.parametrize("key", [f"c/1/{MARKER}", "c/1/deep/er/b"])
def test_every_flipped_bit_is_noticed(tmp_path, key):
    store = MemoryStore()
    upload_folder(store, "c/1", write(tmp_path / "first", FILES))
    data = store.read(key)
    for at in range(0, len(data), max(len(data) // 50, 1)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        store.delete(key)
        store.create(key, bytes(flipped))
        with pytest.raises(DamagedObject):
            download_folder(store, "c/1", tmp_path / "back")


def test_a_missing_file_is_damage(tmp_path):
    store = MemoryStore()
    upload_folder(store, "c/1", write(tmp_path / "first", FILES))
    store.delete("c/1/a")
    with pytest.raises(DamagedObject, match="missing"):
        download_folder(store, "c/1", tmp_path / "back")
