"""Stores that die, count or fail, and one-line writes, for the tests of shards."""

from __future__ import annotations

from collections.abc import Iterable

from infra.contracts.errors import StorageError
from infra.contracts.json_codec import to_json
from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Group
from infra.shards.shard_writer import write_shard
from infra.storage.memory_store import MemoryStore
from infra.storage.object_store import ObjectStore
from tests.builders import RECIPE


class Died(Exception):
    """The process ended here."""


class DyingStore(MemoryStore):
    """A store whose client dies just before (or just after) its n-th creation."""

    def __init__(self, creations: int, *, after: bool = False) -> None:
        super().__init__()
        self.creations, self.after = creations, after

    def create(self, key: str, data: bytes | Iterable[bytes | memoryview]) -> bool:
        self.creations -= 1
        if self.creations == 0 and not self.after:
            raise Died(key)
        created = super().create(key, data)
        if self.creations == 0:
            raise Died(key)
        return created


def write(store: ObjectStore, *records: Group, now: float = 1.0) -> ShardManifest:
    return write_shard(store, records, recipe_digest=RECIPE, now=now)


def encoded(records: Iterable[Group]) -> list[bytes]:
    return [to_json(group) for group in records]


def overwrite(store: MemoryStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.create(key, data)


class CountingStore(MemoryStore):
    """Remembers what was read and listed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.broken = ""

    def read(self, key: str) -> bytes:
        self.asked.append(key)
        if key == self.broken:
            raise StorageError(f"{key}: a hiccup")
        return super().read(key)

    def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        self.asked.append(prefix)
        return super().list_after(prefix, after, limit)
