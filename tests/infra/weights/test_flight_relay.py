"""Relays and restarted roots: one fetch however many ask, trees, and the store when all is gone."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from infra.clock import ManualClock
from infra.contracts.errors import ConfigError, DamagedObject, StorageError
from infra.storage.memory_store import MemoryStore
from infra.weights.flight_client import FlightWeights
from infra.weights.flight_server import WeightServer
from infra.weights.stored_weights import StoredWeights
from infra.weights.weight_source import FastWeights
from infra.weights.weight_store import TensorSlice
from tests.infra.weights.flight_setup import assert_same, make_arrays, make_manifest


class Tree:
    """A store, and servers that are closed at the end."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = ManualClock()
        self.trainer = StoredWeights(self.store, "demo")
        self.servers: list[WeightServer] = []

    def reader(self) -> StoredWeights:
        return StoredWeights(self.store, "")

    def root(self, **options: object) -> WeightServer:
        return self._start(self.reader(), **options)

    def relay(self, upstream: WeightServer) -> WeightServer:
        source = FastWeights(FlightWeights(upstream.address), self.reader(), clock=self.clock)
        return self._start(source, relay=True)

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _start(self, source, **options: object) -> WeightServer:
        self.servers.append(WeightServer(source=source, clock=self.clock, **options))
        return self.servers[-1]


@pytest.fixture
def tree():
    tree = Tree()
    yield tree
    tree.close()


def test_a_restarted_root_fills_itself_from_the_store_as_it_is_asked(tree):
    tree.trainer.publish(0, make_arrays(0))
    manifest = tree.trainer.publish(1, make_arrays(1))
    client = FlightWeights(tree.root().address)
    assert client.latest() == manifest and client.versions() == [], "the bytes come when asked for"
    assert_same(client.fetch(1), make_arrays(1))
    assert_same(client.fetch(0), make_arrays(0))
    assert client.versions() == [0, 1] and client.stats()["fetches"] == 2


def test_a_server_that_the_trainer_cannot_reach_follows_the_store(tree):
    client = FlightWeights(tree.root().address)
    assert client.latest() is None
    tree.trainer.publish(1, make_arrays(1))
    assert client.latest() is None, "it was asked just now"
    tree.clock.advance(1)
    assert client.latest().version == 1
    assert_same(client.fetch(1), make_arrays(1))


def test_latest_in_the_store_shows_what_is_staged(tree):
    """The trainer died between LATEST and commit: the bytes are here already."""
    client = FlightWeights(tree.root().address)
    client.put(make_manifest(1, by=""), make_arrays(1))
    stored = tree.trainer.publish(1, make_arrays(1))
    assert client.latest() == stored
    assert_same(client.fetch(1), make_arrays(1))
    assert client.stats()["fetches"] == 0


def test_nothing_is_shown_that_the_store_does_not_have(tree):
    client = FlightWeights(tree.root().address)
    early = make_manifest(1)
    client.put(early, make_arrays(1))
    with pytest.raises(StorageError, match="the store has nothing; publish it there first"):
        client.commit(early)
    tree.trainer.publish(1, make_arrays(9))
    with pytest.raises(StorageError, match="cannot be committed, the store has"):
        client.commit(early)
    tree.clock.advance(1)
    assert_same(client.fetch(client.latest().version), make_arrays(9))


def test_sixteen_readers_one_upstream_fetch(tree):
    tree.trainer.publish(1, make_arrays(1))
    root = tree.root()
    relay = tree.relay(root)

    def read(_: int) -> dict[str, np.ndarray]:
        client = FlightWeights(relay.address)
        return client.fetch(client.latest().version)

    with ThreadPoolExecutor(16) as pool:
        for fetched in pool.map(read, range(16)):
            assert_same(fetched, make_arrays(1))
    size = sum(array.nbytes for array in make_arrays(1).values())
    assert (root.stats()["gets"], root.stats()["bytes_sent"]) == (1, size)
    assert (relay.stats()["fetches"], relay.stats()["gets"]) == (1, 16)


def test_a_tree_of_relays(tree):
    root = tree.root()
    leaf = FlightWeights(tree.relay(tree.relay(root)).address)
    trainer = FlightWeights(root.address)
    for version in range(3):
        manifest = tree.trainer.publish(version, make_arrays(version))
        trainer.put(manifest, make_arrays(version))
        trainer.commit(manifest)
        tree.clock.advance(1)
        assert leaf.latest() == manifest
        assert_same(leaf.fetch(version), make_arrays(version))
        box = leaf.fetch(version, [TensorSlice("embed", (1, 1), (2, 2))])
        assert np.array_equal(box["embed"], make_arrays(version)["embed"][1:3, 1:3])
    assert root.stats()["gets"] == 3


def test_a_relay_without_its_upstream_uses_the_store(tree):
    root = tree.root()
    relay = FlightWeights(tree.relay(root).address)
    tree.trainer.publish(1, make_arrays(1))
    assert relay.latest().version == 1
    root.close()
    assert_same(relay.fetch(1), make_arrays(1))
    tree.trainer.publish(2, make_arrays(2))
    tree.clock.advance(1)
    assert relay.latest().version == 2
    assert_same(relay.fetch(2), make_arrays(2))


def test_a_relay_takes_no_puts(tree):
    relay = FlightWeights(tree.relay(tree.root()).address)
    for call in (lambda m: relay.put(m, make_arrays(1)), relay.commit):
        with pytest.raises(ConfigError, match="is a relay; put weights into the root"):
            call(make_manifest(1))


class Broken:
    """A source that fails, and counts how often it is asked."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def latest(self):
        self.asked += 1
        raise self.error

    def manifest(self, version: int):
        self.asked += 1
        raise self.error

    def fetch(self, version: int, wanted: Iterable[str | TensorSlice] | None = None):
        raise self.error

    def versions(self) -> list[int]:
        raise self.error


@pytest.mark.parametrize(
    "error, seen",
    [
        (DamagedObject("weights/v1: bad"), DamagedObject),
        (KeyError("version 1 was retired"), KeyError),
        (RuntimeError("a bug"), StorageError),
    ],
)
def test_errors_of_the_source_reach_every_reader(error, seen):
    server = WeightServer(source=Broken(error))

    def read(_: int) -> None:
        with pytest.raises(seen, match=str(error.args[0])):
            FlightWeights(server.address).manifest(1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    server.close()


def test_what_is_held_is_served_while_the_source_fails():
    source = Broken(StorageError("the bucket is gone"))
    server = WeightServer(source=source)
    client = FlightWeights(server.address)
    with pytest.raises(StorageError, match="the bucket is gone"):
        client.latest()
    client.put(make_manifest(1), make_arrays(1))
    server._held.promote(make_manifest(1))
    assert client.latest().version == 1
    assert_same(client.fetch(1), make_arrays(1))
    assert server.stats()["last_error"] == "the bucket is gone"
    server.close()
