"""Two publishers at once: LATEST belongs to the newer incarnation, and the older one stops."""

from __future__ import annotations

import numpy as np
import pytest

from infra.contracts.errors import Fenced, StorageError
from infra.storage.memory_store import MemoryStore
from infra.weights.latest_pointer import claim_latest, read_latest
from infra.weights.stored_weights import StoredWeights

OLD = {"incarnation": "old", "epoch": 1}
NEW = {"incarnation": "new", "epoch": 2}


def arrays(value: int) -> dict[str, np.ndarray]:
    return {"a": np.full(5, value, "f4"), "b": np.full((2, 2), value, "f4")}


class Interleaving(MemoryStore):
    """Another process acts just before this one's n-th call of the store."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left, self.other = 10**9, lambda: None

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == -1:
            self.other()

    def read_with_token(self, key):
        self._count()
        return super().read_with_token(key)

    def create(self, key, data, *, durable=True):
        self._count()
        return super().create(key, data)

    def compare_and_swap(self, key, data, expected):
        self._count()
        return super().compare_and_swap(key, data, expected)

    def list_after(self, prefix, after="", limit=1000):
        self._count()
        return super().list_after(prefix, after, limit)


def start(store: Interleaving) -> None:
    StoredWeights(store, "r").publish(0, arrays(0), **OLD)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_successor_comes_between_any_two_calls(same, ahead):
    """The old trainer publishes 1; the new one claims LATEST and publishes up to 1 + ahead."""
    ended = set()
    for call in range(20):
        store = Interleaving()
        start(store)

        def succeed(store=store):
            claim_latest(store, "new", 2)
            weights = StoredWeights(store, "r")
            for version in range(1, 2 + ahead):
                try:
                    weights.publish(version, arrays(version if same else 10 + version), **NEW)
                except StorageError as e:  # the old manifest was there first: the hook's business
                    assert not same and "exists with other weights" in str(e)
                    return

        store.other, store.calls_left = succeed, call
        try:
            StoredWeights(store, "r").publish(1, arrays(1), **OLD)
            ended.add("published")
        except Fenced as e:
            assert "belongs to trainer new (number 2), not to trainer old (number 1)" in str(e)
            ended.add("fenced")
        through = store.calls_left >= 0
        store.calls_left = 10**9
        if through:  # the old one, before the other came
            assert read_latest(store).epoch == 1
            break
        pointer = read_latest(store)
        assert (pointer.incarnation, pointer.epoch) == ("new", 2)
        reader = StoredWeights(store, "r")
        assert reader.latest().version == pointer.version
        for version in reader.versions():
            value = set(np.unique(reader.fetch(version)["a"])) | set(
                np.unique(reader.fetch(version)["b"])
            )
            assert value in ({version}, {10 + version}), "never a mix of the two"
        with pytest.raises(Fenced):
            StoredWeights(store, "r").publish(9, arrays(9), **OLD)
    else:
        raise AssertionError("a publication has fewer calls than that")
    assert ended == {"fenced", "published"}


def test_a_predecessor_comes_back_between_any_two_calls():
    """The old trainer tries at every moment of the new one's life: it never moves LATEST."""
    for call in range(30):
        store = Interleaving()
        start(store)
        claim_latest(store, "new", 2)

        def come_back(store=store):
            with pytest.raises(Fenced):
                StoredWeights(store, "r").publish(1, arrays(66), **OLD)

        store.other, store.calls_left = come_back, call
        weights = StoredWeights(store, "r")
        for version in (1, 2):
            weights.publish(version, arrays(version), **NEW)
        through = store.calls_left >= 0
        store.calls_left = 10**9
        if through:
            break
        assert (read_latest(store).version, read_latest(store).epoch) == (2, 2)
        assert [float(weights.fetch(v)["a"][0]) for v in weights.versions()] == [0, 1, 2]
    else:
        raise AssertionError("two publications have fewer calls than that")


def test_one_epoch_of_two_names_is_refused():
    store = MemoryStore()
    StoredWeights(store, "r").publish(0, arrays(0), **OLD)
    with pytest.raises(Fenced, match="belongs to trainer old"):
        StoredWeights(store, "r").publish(1, arrays(1), incarnation="twin", epoch=1)


def test_a_tool_is_not_fenced_and_takes_nothing_over():
    store = MemoryStore()
    StoredWeights(store, "r").publish(0, arrays(0), **NEW)
    StoredWeights(store, "r").publish(1, arrays(1))
    assert (read_latest(store).version, read_latest(store).incarnation) == (1, "new")
    with pytest.raises(Fenced):
        claim_latest(store, "old", 1)


def test_nothing_to_claim():
    store = MemoryStore()
    claim_latest(store, "new", 2)
    assert read_latest(store) is None
