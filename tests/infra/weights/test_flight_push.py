"""The trainer's way into a weight server: fast when it is there, harmless when it is not."""

from __future__ import annotations

import itertools
import time

from infra.clock import ManualClock
from infra.storage.memory_store import MemoryStore
from infra.weights.flight_push import REST_SECS, FlightPush
from infra.weights.flight_server import WeightServer
from infra.weights.open_reader import open_push, open_reader
from infra.weights.stored_weights import StoredWeights
from tests.infra.weights.flight_setup import assert_same, make_arrays

WHO = {"incarnation": "one", "epoch": 1}
FILES = {"token_file": "", "ca_file": ""}


class Trainer:
    """Publishes as the hook does: the server gets the bytes, the store is written, then commit."""

    def __init__(self, address: str) -> None:
        self.store, self.clock = MemoryStore(), ManualClock()
        self.weights = StoredWeights(self.store, "demo")
        push = open_push(address, "demo", clock=self.clock, **FILES)
        assert isinstance(push, FlightPush)
        self.push = push

    def publish(self, version: int) -> None:
        arrays = make_arrays(version)
        self.push.begin(version, arrays, **WHO)
        self.push.commit(self.weights.publish(version, arrays, **WHO))


def test_a_version_travels_while_the_store_is_written() -> None:
    server = WeightServer()
    try:
        trainer = Trainer(server.address)
        for version in range(3):
            trainer.publish(version)
        assert trainer.push.failures == 0 and trainer.push.trouble == ""
        stored = StoredWeights(trainer.store, "")
        reader = open_reader(stored, server.address, clock=trainer.clock, **FILES)
        latest = reader.latest()
        assert latest is not None and latest.version == 2
        assert_same(reader.fetch(2), make_arrays(2))
        assert server.stats()["gets"] == 1
        trainer.push.close()
    finally:
        server.close()


def test_a_server_that_is_gone_is_left_alone_for_a_while_and_used_again() -> None:
    server = WeightServer()
    trainer = Trainer(server.address)
    trainer.publish(0)
    server.close()
    trainer.publish(1)
    assert trainer.push.failures == 1 and trainer.push.trouble
    trainer.publish(2)  # not even tried
    assert trainer.push.failures == 1
    server = WeightServer(f"127.0.0.1:{server.port}")
    try:
        versions, ends_at = itertools.count(3), time.monotonic() + 20
        while trainer.push.trouble and time.monotonic() < ends_at:  # gRPC connects anew by itself
            trainer.clock.advance(REST_SECS)
            trainer.publish(next(versions))
        assert trainer.push.trouble == ""
        newest = next(versions) - 1
        assert server.stats()["versions"] == [newest]
        assert StoredWeights(trainer.store, "").versions() == list(range(newest + 1))
        trainer.push.close()
    finally:
        server.close()


def test_without_a_server_the_store_is_read_as_it_is() -> None:
    stored = StoredWeights(MemoryStore(), "")
    assert open_reader(stored, "", clock=ManualClock(), **FILES) is stored
    assert open_push("", "demo", clock=ManualClock(), **FILES) is None
