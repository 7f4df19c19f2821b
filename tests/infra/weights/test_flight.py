"""The weight server and its client: put, commit, get, boxes; what stays visible and what not."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from infra.contracts.errors import ConfigError, DamagedObject, Fenced, StorageError
from infra.weights import flight_wire
from infra.weights.flight_client import FlightWeights
from infra.weights.flight_server import WeightServer
from infra.weights.weight_store import TensorSlice
from tests.infra.weights.flight_setup import assert_same, make_arrays, make_manifest, publish


@pytest.fixture
def server():
    server = WeightServer()
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = FlightWeights(server.address)
    yield client
    client.close()


def test_put_commit_get(client):
    assert client.latest() is None and client.versions() == []
    manifest = make_manifest(3)
    client.put(manifest, make_arrays(3))
    assert client.latest() is None, "put is not yet seen"
    client.commit(manifest)
    assert client.latest() == client.manifest(3) == manifest
    assert client.versions() == [3]
    assert_same(client.fetch(3), make_arrays(3))
    assert_same(client.fetch(3, ["half"]), {"half": make_arrays(3)["half"]})
    assert client.fetch(3, []) == {}


def test_the_store_s_manifest_replaces_the_one_put_under(client):
    early = make_manifest(1)
    client.put(early, make_arrays(1))
    stored = replace(early, optimizer_step=99, created_at=5.0)
    client.commit(stored)
    assert client.latest() == stored


def test_only_the_bytes_of_a_box_travel(client):
    publish(client, 2)
    array = make_arrays(2)["embed"]
    before = client.stats()["bytes_sent"]
    rows = client.fetch(2, [TensorSlice("embed", (1, 0), (2, 4))])["embed"]
    corner = client.fetch(2, [TensorSlice("embed", (4, 1), (2, 2))])["embed"]
    nothing = client.fetch(2, [TensorSlice("embed", (6, 0), (0, 4))])["embed"]
    assert np.array_equal(rows, array[1:3]) and np.array_equal(corner, array[4:6, 1:3])
    assert nothing.shape == (0, 4)
    assert client.stats()["bytes_sent"] - before == rows.nbytes + corner.nbytes


def test_large_tensors_travel_in_chunks(client, monkeypatch):
    monkeypatch.setattr(flight_wire, "CHUNK_BYTES", 56)
    publish(client, 1)
    assert_same(client.fetch(1), make_arrays(1))


def test_arrays_are_views_aligned_for_xla(client):
    publish(client, 1)
    fetched = client.fetch(1)
    for name, array in fetched.items():
        assert array.ctypes.data % flight_wire.ALIGNMENT == 0, name
        assert not array.flags.owndata, name


@pytest.mark.parametrize(
    "version, wanted, error, words",
    [
        (2, None, KeyError, "version 2 is not in the server, which has 1"),
        (1, ["nose"], KeyError, "no tensor 'nose'"),
        (1, ["half", "half"], ValueError, "half is wanted twice"),
        (1, [TensorSlice("embed", (5, 0), (2, 4))], ValueError, "not lie in tensor|name every"),
        (1, [TensorSlice("embed", (-1, 0), (2, 4))], ValueError, "not lie in tensor|name every"),
        (1, [TensorSlice("embed", (0,), (2,))], ValueError, "not lie in tensor|name every"),
    ],
)
def test_what_is_not_there(client, version, wanted, error, words):
    publish(client, 1)
    with pytest.raises(error, match=words):
        client.fetch(version, wanted)


def test_versions_only_grow_and_the_newest_stay(client):
    for version in (1, 4, 5):
        publish(client, version)
    assert client.versions() == [4, 5]
    with pytest.raises(StorageError, match="the server has 5 already and versions only grow"):
        client.put(make_manifest(4, make_arrays(9)), make_arrays(9))
    assert client.latest().version == 5


def test_a_repeated_put_and_commit_change_nothing(client):
    manifest = publish(client, 1)
    publish(client, 1)
    assert client.latest() == manifest and client.stats()["versions"] == [1]


def test_other_weights_under_a_seen_version_are_refused(client):
    publish(client, 1)
    with pytest.raises(StorageError, match="versions only grow"):
        client.put(make_manifest(1, make_arrays(7)), make_arrays(7))


def test_commit_without_these_weights(client):
    with pytest.raises(StorageError, match="does not hold it"):
        client.commit(make_manifest(1))
    client.put(make_manifest(1), make_arrays(1))
    with pytest.raises(StorageError, match="does not hold it"):
        client.commit(make_manifest(1, make_arrays(2)))
    client.commit(make_manifest(1))


def test_an_older_trainer_is_fenced_off(client):
    publish(client, 1)
    for by, epoch in (("i1", 0), ("i0", 1)):
        late = make_manifest(2, by=by, epoch=epoch)
        with pytest.raises(Fenced, match=f"trainer '{by}' .*was replaced"):
            client.put(late, make_arrays(2))
        with pytest.raises(Fenced):
            client.commit(late)
    newer = make_manifest(2, by="i2", epoch=2)
    client.put(newer, make_arrays(2))
    with pytest.raises(Fenced, match="replaced at the server by trainer 'i2'"):
        client.put(make_manifest(3), make_arrays(3))
    client.commit(newer)
    assert client.latest() == newer


def test_two_publishers_at_once(client):
    """One of each pair wins whole; the other gets an error, never a mix."""

    def run(trainer: int) -> int:
        done = 0
        for version in range(20):
            arrays = make_arrays(100 * trainer + version)
            manifest = make_manifest(version, arrays, by=f"i{trainer}", epoch=trainer)
            try:
                client.put(manifest, arrays)
                client.commit(manifest)
                done += 1
            except (Fenced, StorageError):
                break
        return done

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run, (1, 2)))
    latest = client.latest()
    assert done[1] and latest.incarnation == "i2"
    assert_same(client.fetch(latest.version), make_arrays(200 + latest.version))


def test_50_readers_never_mix_two_versions(client):
    """100 versions go by under 50 readers; each read is of one version, never of an older one."""
    turns: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def read(_: int) -> int:
        seen, reads = -1, 0
        while turns.get():
            manifest = client.latest()
            assert manifest.version >= seen
            seen = manifest.version
            try:
                fetched = client.fetch(seen)
            except KeyError:  # two newer ones have come meanwhile
                continue
            reads += 1
            assert {int(array[0]) for array in fetched.values()} == {seen}
        return reads

    def publish_ones(version: int) -> None:
        arrays = {name: np.full(100, version) for name in "abcdef"}
        manifest = make_manifest(version, arrays)
        client.put(manifest, arrays)
        client.commit(manifest)

    publish_ones(0)
    with ThreadPoolExecutor(50) as pool:
        reads = [pool.submit(read, number) for number in range(50)]
        for version in range(1, 101):
            for _ in range(6):
                turns.put(True)
            publish_ones(version)
        for _ in range(50):
            turns.put(False)
        assert sum(future.result() for future in reads) > 100
    assert client.latest().version == 100


@pytest.mark.parametrize(
    "listen, words",
    [
        ("127.0.0.1", "give host:port"),
        (":80", "give host:port"),
        ("127.0.0.1:99999", "give host:port"),
        ("127.0.0.1:x", "give host:port"),
        ("203.0.113.7:0", "cannot listen there"),
    ],
)
def test_bad_addresses_are_one_line(listen, words):
    with pytest.raises(ConfigError, match=words) as e:
        WeightServer(listen)
    assert "\n" not in str(e.value)


def test_a_port_in_use_is_one_line(server):
    with pytest.raises(ConfigError, match=r"cannot listen there: .*in use") as e:
        WeightServer(f"127.0.0.1:{server.port}")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("address", ["127.0.0.1:7", "http://127.0.0.1:7", "", "grpc://x:y"])
def test_bad_client_addresses(address):
    with pytest.raises((ConfigError, StorageError)) as e:
        FlightWeights(address, call_secs=2.0).latest()
    assert "\n" not in str(e.value) and (address or "''") in str(e.value)


def test_a_manifest_that_lies_about_its_tensors(client):
    lying = replace(make_manifest(1), digest="0" * 32)
    with pytest.raises(DamagedObject, match=r"says 0{32}; its tensors give"):
        client.put(lying, make_arrays(1))
