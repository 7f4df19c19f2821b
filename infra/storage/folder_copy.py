"""Folders of files in an object store, and back: checkpoints and initial models in a bucket.

Libraries such as Orbax want a folder of this machine. So they get one, and the folder is copied:
files first, then the marker that lists them with sizes and checksums. A folder without its marker
does not exist; the marker goes first when a folder is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from infra.contracts.errors import DamagedObject, SchemaMismatch
from infra.contracts.json_codec import from_json, to_marker
from infra.storage.listing import keys_after
from infra.storage.object_store import ObjectStore

MARKER = "COPIED.json"
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedFile:
    path: str
    """Relative, with slashes."""
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedFolder:
    """The marker."""

    files: tuple[CopiedFile, ...]


def upload_folder(store: ObjectStore, prefix: str, folder: Path) -> CopiedFolder:
    """Copy every file below ``folder`` to ``prefix/...``; a copy that is complete stays as it is.

    Raises:
        FileNotFoundError: the folder, or a file of it, went away meanwhile; nothing is visible.
    """
    complete = copied_folder(store, prefix)
    if complete is not None:
        return complete
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        key = f"{prefix}/{name}"
        data = _bytes(path)
        file = CopiedFile(path=name, size_bytes=len(data), crc32c=google_crc32c.value(data))
        if not store.create(key, _pieces(data)) and _sum(store.view(key)) != file.crc32c:
            store.delete(key)  # a copy that was broken off, of another folder
            store.create(key, _pieces(data))
        files.append(file)
    if not files:
        raise FileNotFoundError(f"{folder}: no files there")
    copied = CopiedFolder(files=tuple(files))
    store.create(f"{prefix}/{MARKER}", to_marker(copied))
    return copied


def download_folder(store: ObjectStore, prefix: str, folder: Path) -> bool:
    """Make ``folder`` hold exactly what was copied; False if there is no complete copy.

    Files that are there already and right are kept.

    Raises:
        DamagedObject: a file is missing or is not what the marker says.
    """
    copied = copied_folder(store, prefix)
    if copied is None:
        return False
    wanted = {folder / file.path for file in copied.files}
    for path in [path for path in folder.rglob("*") if path.is_file() and path not in wanted]:
        path.unlink()
    for file in copied.files:
        if not _is_there(folder / file.path, file):
            _download(store, f"{prefix}/{file.path}", folder / file.path, file)
    return True


def copied_folder(store: ObjectStore, prefix: str) -> CopiedFolder | None:
    """The marker of a complete copy, or None. Raises ``DamagedObject`` if it cannot be read."""
    key = f"{prefix}/{MARKER}"
    found = store.read_with_token(key)
    if found is None:
        return None
    try:
        return from_json(CopiedFolder, found[0])
    except SchemaMismatch as e:
        raise DamagedObject(f"{store.url}/{key}: {e}") from e


def delete_folder(store: ObjectStore, prefix: str) -> None:
    """Delete a copy, its marker first. Absent is fine."""
    store.delete(f"{prefix}/{MARKER}")
    for key in keys_after(store, f"{prefix}/"):
        store.delete(key)


def _download(store: ObjectStore, key: str, path: Path, file: CopiedFile) -> None:
    try:
        data = store.view(key)
    except KeyError:
        raise DamagedObject(
            f"{store.url}/{key}: it is missing, its folder's marker names it"
        ) from None
    if (len(data), _sum(data)) != (file.size_bytes, file.crc32c):
        raise DamagedObject(
            f"{store.url}/{key}: it is not what its folder's marker says; delete it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _is_there(path: Path, file: CopiedFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    return google_crc32c.value(_bytes(path)) == file.crc32c


def _sum(data: memoryview) -> int:
    return google_crc32c.value(np.frombuffer(data, np.uint8))


def _pieces(data: np.ndarray) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield memoryview(data[start : start + _PIECE_BYTES])


def _bytes(path: Path) -> np.ndarray:
    """A file's bytes (uint8), mapped: not read at once."""
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
