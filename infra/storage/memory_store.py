"""The object store in this process's memory: for tests, and the model of what a store promises."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.object_key import check_key, check_prefix, content_token
from infra.storage.object_store import Token


class MemoryStore:
    """Implements ``ObjectStore``; safe from several threads."""

    url = "memory://"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._keys: list[str] = []

    def read(self, key: str) -> bytes:
        return self._objects[check_key(key)]

    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self.read(key)
        if start < 0 or length < 0 or start + length > len(data):
            raise DamagedObject(
                f"{self.url}{key}: bytes {start}..{start + length} wanted, it has {len(data)}"
            )
        return data[start : start + length]

    def view(self, key: str) -> memoryview:
        return memoryview(self.read(key))

    def read_with_token(self, key: str) -> tuple[bytes, Token] | None:
        data = self._objects.get(check_key(key))
        return None if data is None else (data, content_token(data))

    def create(
        self, key: str, data: bytes | Iterable[bytes | memoryview], *, durable: bool = True
    ) -> bool:
        del durable  # nothing here outlives the process
        check_key(key)
        if key in self._objects:
            return False
        pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        return self._replace(key, b"".join(map(bytes, pieces)), None)

    def compare_and_swap(self, key: str, data: bytes, expected: Token | None) -> Token | None:
        data = bytes(data)
        return content_token(data) if self._replace(check_key(key), data, expected) else None

    def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        with self._lock:
            first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
            found = []
            for key in self._keys[first:]:
                if len(found) >= limit or not key.startswith(prefix):
                    break
                found.append(key)
            return found

    def list_folders(self, prefix: str, after: str = "") -> list[str]:
        folder = check_prefix(prefix).removesuffix("/") + "/" if prefix else ""
        rests = (key[len(folder) :] for key in self.list_after(folder, limit=len(self._keys)))
        names = {rest.partition("/")[0] for rest in rests if "/" in rest}
        return sorted(name for name in names if name > after)

    def delete(self, key: str) -> None:
        with self._lock:
            if self._objects.pop(check_key(key), None) is not None:
                del self._keys[bisect_left(self._keys, key)]

    def _replace(self, key: str, data: bytes, expected: Token | None) -> bool:
        with self._lock:
            old = self._objects.get(key)
            if (None if old is None else content_token(old)) != expected:
                return False
            if old is None:
                self._refuse_folder(key)
                insort(self._keys, key)
            self._objects[key] = data
            return True

    def _refuse_folder(self, key: str) -> None:
        """A local folder cannot hold ``a`` and ``a/b`` at once, so no store may."""
        parts = key.split("/")
        above = ("/".join(parts[:i]) for i in range(1, len(parts)))
        below = bisect_left(self._keys, f"{key}/")
        if any(name in self._objects for name in above) or (
            below < len(self._keys) and self._keys[below].startswith(f"{key}/")
        ):
            raise StorageError(f"{self.url}{key}: a key cannot be a folder too; choose another")
