"""Every byte of a small version, one flipped bit each: seen by a reader or by ``verify``."""

from __future__ import annotations

import random

import numpy as np
import pytest

from infra.contracts.errors import StorageError
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from infra.weights.delta import DeltaPolicy
from infra.weights.stored_weights import StoredWeights


class FullStore(LocalStore):
    """A disk with room for so many bytes more."""

    room = 1 << 40

    def create(self, key, data, *, durable=True):
        size = len(data) if isinstance(data, bytes) else sum(memoryview(d).nbytes for d in data)
        if size > self.room:
            raise StorageError(f"{self.url}/{key}: cannot write: No space left on device")
        self.room -= size
        return super().create(key, data, durable=durable)


def arrays(version: int) -> dict[str, np.ndarray]:
    large = np.arange(300, dtype="f4").reshape(30, 10)
    large[version % 30, 3] = 99
    return {"large": large, "small": np.full(3, version, "i1"), "none": np.zeros((0, 2), "f8")}


def make_store() -> MemoryStore:
    store = MemoryStore()
    weights = StoredWeights(store, "r", deltas=DeltaPolicy(full_every=9))
    for version in (0, 1):
        weights.publish(version, arrays(version), cuts={"large": (1, 2)}, incarnation="i", epoch=1)
    return store


KEYS = make_store().list_after("weights/")


def test_all_kinds_are_there():
    kinds = {key.rpartition(".")[2] for key in KEYS if key.startswith("weights/v00000001")}
    assert kinds == {"delta", "json", "safetensors"} and "weights/LATEST" in KEYS


@pytest.mark.parametrize("key", KEYS)
def test_every_byte(key):
    rng = random.Random(key)
    sound = make_store()
    data = sound.read(key)
    for position in range(len(data)):
        store = make_store_with(sound, key, flipped(data, position, rng.randrange(8)))
        reader = StoredWeights(store, "r")
        with pytest.raises((StorageError, KeyError)) as e:
            latest = reader.latest()
            reader.verify(latest.version)
        assert "\n" not in str(e.value)


def flipped(data: bytes, position: int, bit: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def make_store_with(sound: MemoryStore, key: str, data: bytes) -> MemoryStore:
    store = MemoryStore()
    for other in KEYS:
        store.create(other, data if other == key else sound.read(other))
    return store


def test_a_full_disk_shows_nothing_and_the_next_publication_works(tmp_path):
    store = FullStore(tmp_path)
    weights = StoredWeights(store, "r")
    before = weights.publish(0, arrays(0))
    for room in (0, 1_600):
        store.room = room
        with pytest.raises(StorageError, match="No space left"):
            weights.publish(1, arrays(1))
        assert weights.latest() == before and weights.versions() == [0]
    store.room = 1 << 40
    assert weights.publish(1, arrays(1)) == StoredWeights(store, "r").latest()
