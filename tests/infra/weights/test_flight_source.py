"""The fast path and the store together: the store is the truth, the server only makes it fast."""

from __future__ import annotations

import socket

import pytest

from infra.clock import ManualClock
from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.memory_store import MemoryStore
from infra.weights.flight_client import FlightWeights
from infra.weights.flight_server import WeightServer
from infra.weights.stored_weights import StoredWeights
from infra.weights.weight_source import FastWeights
from infra.weights.weight_store import TensorSlice
from tests.infra.weights.flight_setup import assert_same, make_arrays, make_manifest


class Setting:
    """A store, a server that knows nothing of it, and a reader of both."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.trainer = StoredWeights(MemoryStore(), "demo")
        self.server = WeightServer()
        self.fast = FlightWeights(self.server.address, call_secs=2.0)
        durable = StoredWeights(self.trainer._store, "")
        self.reader = FastWeights(self.fast, durable, clock=self.clock)

    def publish(self, version: int) -> None:
        manifest = self.trainer.publish(version, make_arrays(version))
        self.fast.put(manifest, make_arrays(version))
        self.fast.commit(manifest)

    def restart(self) -> None:
        self.server = WeightServer(f"127.0.0.1:{self.server.port}")


@pytest.fixture
def setting():
    setting = Setting()
    yield setting
    setting.server.close()


def test_the_server_is_asked_first(setting):
    assert setting.reader.latest() is None
    setting.publish(1)
    assert setting.reader.latest() == setting.trainer.latest()
    assert_same(setting.reader.fetch(1), make_arrays(1))
    box = setting.reader.fetch(1, [TensorSlice("embed", (0, 0), (1, 4)), "flag"])
    assert box["embed"].shape == (1, 4) and len(box) == 2
    assert (setting.reader.fast_fetches, setting.reader.store_fetches) == (2, 0)
    assert setting.reader.errors == 0 and setting.reader.versions() == [1]


def test_the_store_when_the_server_is_gone_and_back_when_it_returns(setting):
    setting.publish(1)
    setting.server.close()
    assert setting.reader.latest().version == 1
    assert_same(setting.reader.fetch(1), make_arrays(1))
    assert (setting.reader.store_fetches, setting.reader.errors) == (1, 1)
    assert setting.fast.address in setting.reader.last_error
    setting.trainer.publish(2, make_arrays(2))
    assert setting.reader.latest().version == 2, "the store goes on"
    setting.clock.advance(1)
    assert setting.reader.latest().version == 2 and setting.reader.errors == 2
    setting.clock.advance(0.9)
    assert setting.reader.latest().version == 2 and setting.reader.errors == 2, "backs off longer"
    setting.restart()
    setting.clock.advance(60)
    setting.fast.close()
    setting.fast = setting.reader._fast = FlightWeights(setting.server.address)
    setting.publish(3)
    assert setting.reader.latest().version == 3
    assert_same(setting.reader.fetch(3), make_arrays(3))
    assert setting.reader.fast_fetches == 1 and setting.reader.errors == 2


def test_the_same_client_finds_a_restarted_server(setting):
    setting.publish(1)
    setting.server.close()
    with pytest.raises(StorageError):
        setting.fast.latest()
    setting.restart()
    for _ in range(1000):  # gRPC tries again every 100 ms
        try:
            assert setting.fast.latest() is None
            break
        except StorageError:
            setting.fast._client.wait_for_available(timeout=5)
    else:
        pytest.fail("never came back")


def test_a_version_the_server_lacks(setting):
    setting.trainer.publish(1, make_arrays(1))
    for version in (2, 3, 4):
        setting.publish(version)
    assert setting.reader.latest().version == 4
    assert_same(setting.reader.fetch(1), make_arrays(1))
    assert "version 1 is not in the server" in setting.reader.last_error
    assert_same(setting.reader.fetch(4), make_arrays(4))
    assert (setting.reader.fast_fetches, setting.reader.store_fetches) == (1, 1), "no back-off"
    with pytest.raises(KeyError):
        setting.reader.fetch(9)


def test_damaged_bytes_come_from_the_store(setting):
    setting.publish(1)
    held = setting.server._held.get(1)
    held.arrays["half"] = held.arrays["half"] + held.arrays["half"].dtype.type(1)
    assert_same(setting.reader.fetch(1), make_arrays(1))
    assert setting.reader.store_fetches == 1
    assert "tensor half: crc32c" in setting.reader.last_error


def test_a_version_the_store_does_not_have_is_not_believed(setting):
    """The server shows what no store can confirm: LATEST stays what the store says."""
    setting.publish(1)
    ghost = make_manifest(2)
    setting.fast.put(ghost, make_arrays(2))
    setting.fast.commit(ghost)
    assert setting.reader.latest().version == 1
    assert "version 2" in setting.reader.last_error
    with pytest.raises(KeyError):
        setting.reader.fetch(2)


def test_other_weights_than_the_store_s_are_refused(setting):
    manifest = make_manifest(1, make_arrays(5), by="")
    setting.fast.put(manifest, make_arrays(5))
    setting.fast.commit(manifest)
    stored = setting.trainer.publish(1, make_arrays(1))
    assert setting.reader.latest() == stored
    assert "version 1: the server has" in setting.reader.last_error
    with pytest.raises(DamagedObject, match="the server has"):
        setting.reader._agreed(setting.fast.latest())
    setting.clock.advance(60)
    assert_same(setting.reader.fetch(1), make_arrays(1))
    assert setting.reader.fast_fetches == 0


def test_latest_never_goes_back(setting):
    setting.publish(1)
    setting.publish(2)
    assert setting.reader.latest().version == 2
    setting.server.close()
    older = Setting()
    older.publish(1)
    setting.reader._fast = older.fast
    setting.reader._durable = older.trainer
    setting.clock.advance(60)
    assert setting.reader.latest().version == 2
    older.server.close()


def test_a_server_that_lags_is_noticed(setting):
    setting.publish(1)
    assert setting.reader.latest().version == 1
    setting.trainer.publish(2, make_arrays(2))
    assert setting.reader.latest().version == 1
    setting.clock.advance(5)
    assert setting.reader.latest().version == 2
    assert_same(setting.reader.fetch(2), make_arrays(2))
    assert setting.reader.store_fetches == 1


def test_a_hanging_server_costs_one_deadline_then_the_store(setting):
    setting.trainer.publish(1, make_arrays(1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        setting.reader._fast = FlightWeights(address, call_secs=0.2)
        assert setting.reader.latest().version == 1
        assert_same(setting.reader.fetch(1), make_arrays(1))
    assert setting.reader.errors == 1
