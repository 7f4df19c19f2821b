"""Servers and trainers that die, hang or talk nonsense: nothing is half-used, all calls end."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from infra.contracts.errors import DamagedObject, HeadraceError, SchemaMismatch, StorageError
from infra.contracts.json_codec import to_json
from infra.weights import flight_wire
from infra.weights.flight_client import FlightWeights
from infra.weights.flight_server import WeightServer
from tests.infra.weights.flight_setup import (
    Child,
    assert_same,
    make_arrays,
    make_manifest,
    publish,
)

BIG = {"big": np.arange(8 << 20, dtype=np.int64)}
"""64 MiB: more than any socket buffers, so a transfer can be caught in its middle."""


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


def serve(pipe, arrays_of=None) -> None:
    """Child: serve version 1 (``BIG`` if so asked) until killed."""
    server = WeightServer()
    client = FlightWeights(server.address)
    if arrays_of == "big":
        manifest = make_manifest(1, BIG)
        client.put(manifest, BIG)
        client.commit(manifest)
    else:
        publish(client, 1)
    pipe.send(server.address)
    pipe.recv()


def test_the_server_is_killed_in_the_middle_of_a_get():
    with Child(serve, "big") as child:
        client = FlightWeights(child.pipe.recv())
        manifest = client.latest()
        request = flight.Ticket(flight_wire.to_request(manifest, ["big"]))
        reader = client._client.do_get(request, client._deadline(1 << 26))
        first = reader.read_chunk()
        assert 0 < first.data.nbytes < BIG["big"].nbytes
        child.kill()
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            while True:
                reader.read_chunk()
        with pytest.raises(StorageError) as e:
            client.fetch(1)
    assert client.address in str(e.value) and "\n" not in str(e.value)


def test_the_server_is_killed_in_the_middle_of_a_put():
    with Child(serve) as child:
        client = FlightWeights(child.pipe.recv())

        def contents():
            yield BIG["big"].view(np.uint8), 0
            child.kill()
            yield BIG["big"].view(np.uint8), 0

        with pytest.raises(StorageError, match=client.address), client._errors():
            client._send(make_manifest(2, BIG), contents(), client._deadline(1 << 26))


def put_half(pipe, address) -> None:
    """Child: a trainer that dies after half of its bytes."""
    client = FlightWeights(address)

    def contents():
        yield BIG["big"].view(np.uint8), make_manifest(2, BIG).tensors[0].crc32c
        pipe.send("sent half")
        os._exit(1)

    arrays = BIG | {"second": BIG["big"]}
    client._send(make_manifest(2, arrays), contents(), client._deadline(1 << 27))


def test_the_trainer_is_killed_in_the_middle_of_a_put(server, client):
    publish(client, 1)
    with Child(put_half, server.address) as child:
        assert child.pipe.recv() == "sent half"
        child.process.join()
    with pytest.raises(StorageError, match="does not hold it"):
        client.commit(make_manifest(2, BIG | {"second": BIG["big"]}))
    assert_same(client.fetch(client.latest().version), make_arrays(1))
    publish(client, 2)
    assert client.latest().version == 2


def test_a_wrong_checksum_is_refused(client):
    publish(client, 1)
    arrays = make_arrays(2)
    arrays["embed"] = arrays["embed"] + 1
    with pytest.raises(DamagedObject, match="tensor embed: crc32c of what arrived is"):
        client.put(make_manifest(2), arrays)
    with pytest.raises(StorageError, match="does not hold it"):
        client.commit(make_manifest(2))
    assert client.latest().version == 1


@pytest.mark.parametrize("change", ["fewer", "more", "order", "short", "long"])
def test_other_tensors_than_the_manifest_s_are_refused(client, change):
    manifest = make_manifest(1, {"a": np.zeros(3, "u1"), "b": np.ones(3, "u1")})
    crcs = [entry.crc32c for entry in manifest.tensors]
    a, b = np.zeros(3, np.uint8), np.ones(3, np.uint8)
    contents = {
        "fewer": [(a, crcs[0])],
        "more": [(a, crcs[0]), (b, crcs[1]), (b, crcs[1])],
        "order": [(b, crcs[1]), (a, crcs[0])],
        "short": [(a[:2], crcs[0]), (b, crcs[1])],
        "long": [(np.zeros(4, np.uint8), crcs[0]), (b, crcs[1])],
    }[change]
    with pytest.raises(DamagedObject), client._errors():
        client._send(manifest, contents, client._deadline(0))
    assert client.latest() is None and client.stats()["puts"] == 0


@pytest.mark.parametrize(
    "command, batch, error",
    [
        (b"", None, SchemaMismatch),
        (b"\xff\x00", None, SchemaMismatch),
        (b"{}", None, SchemaMismatch),
        (to_json(make_manifest(1)), pa.record_batch({"a": pa.array([1])}), DamagedObject),
        (
            to_json(make_manifest(1)),
            pa.RecordBatch.from_pylist([{"piece": 0, "crc32c": None, "data": b"x"}]).cast(
                flight_wire.SCHEMA
            ),
            DamagedObject,
        ),
        (
            to_json(make_manifest(1)),
            pa.RecordBatch.from_pylist([], schema=flight_wire.SCHEMA),
            DamagedObject,
        ),
    ],
)
def test_garbage_put(client, command, batch, error):
    with pytest.raises(error) as e, client._errors():
        writer, _ = client._client.do_put(
            flight.FlightDescriptor.for_command(command),
            flight_wire.SCHEMA if batch is None else batch.schema,
            client._deadline(0),
        )
        if batch is not None:
            writer.write_batch(batch)
        writer.close()
    assert "\n" not in str(e.value)
    assert client.stats()["versions"] == []
    publish(client, 1)


@pytest.mark.parametrize(
    "ticket",
    [b"", b"\xff", b"[]", b'{"version":1}', b'{"version":1,"digest":"","asked":[["a",1]]}'],
)
def test_garbage_get(client, ticket):
    publish(client, 1)
    with pytest.raises(ValueError, match="not a request for weights"), client._errors():
        client._client.do_get(flight.Ticket(ticket), client._deadline(0)).read_all()


def test_garbage_actions(client):
    for name, body in (("nonsense", b""), ("manifest", b"x"), ("manifest", b""), ("commit", b"{")):
        with pytest.raises((ValueError, HeadraceError)) as e:
            client._act(name, body)
        assert "\n" not in str(e.value)


class Liar(flight.FlightServerBase):
    """Another Flight service at our address."""

    def do_action(self, context, action):
        return [b"<html>"]


def test_another_service_is_named():
    liar = Liar("grpc://127.0.0.1:0")
    client = FlightWeights(f"grpc://127.0.0.1:{liar.port}")
    with pytest.raises(DamagedObject, match=f"{client.address}: b'<html>' is no answer"):
        client.latest()
    with pytest.raises(HeadraceError):
        client.manifest(1)
    liar.shutdown()


def test_a_server_that_flips_a_bit(server, client):
    publish(client, 1)
    held = server._held.get(1)
    arrays = dict(held.arrays)
    arrays["half"] = arrays["half"].copy()
    arrays["half"].view(np.uint8)[0, 0] ^= 1
    server._held.add(replace(held, arrays=arrays))
    with pytest.raises(DamagedObject, match=r"grpc://.*version 1: tensor half: crc32c"):
        client.fetch(1)
    assert len(client.fetch(1, ["embed"])) == 1


def test_deadlines_when_the_server_hangs():
    """It accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        client = FlightWeights(address, call_secs=0.2, slow_bytes_per_sec=1e9)
        arrays = make_arrays(1)
        for call in (client.latest, client.stats, client.versions, lambda: client.manifest(1)):
            with pytest.raises(StorageError, match=f"{address}: .*") as e:
                call()
            assert "\n" not in str(e.value)
        with pytest.raises(StorageError, match=address):
            client.put(make_manifest(1), arrays)


def test_closing_with_readers_connected(server, client):
    """One idle, one in the middle of an answer that it does not take."""
    manifest = make_manifest(1, BIG)
    client.put(manifest, BIG)
    client.commit(manifest)
    request = flight.Ticket(flight_wire.to_request(manifest, ["big"]))
    stuck = client._client.do_get(request, client._deadline(0))
    stuck.read_chunk()
    other = FlightWeights(server.address)
    other.latest()
    assert not server.close(grace_secs=0.1), "the stuck answer still holds it"
    stuck.cancel()
    with pytest.raises(StorageError):
        other.latest()


def fork_and_ask(pipe) -> None:
    """Child: open a client, fork, and ask in the child of the child."""
    client = FlightWeights(pipe.recv())
    client.latest()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            answer = str(client.latest())
        except StorageError as e:
            answer = str(e)
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    pipe.send(json.loads(os.read(read, 10_000)))


def test_a_client_does_not_cross_a_fork(server):
    with Child(fork_and_ask) as child:
        child.pipe.send(server.address)
        assert "was opened before a fork" in child.pipe.recv()


def test_a_put_lets_other_threads_run(client):
    """The main thread keeps counting while 64 MiB are sent and received in this process."""
    manifest = make_manifest(1, BIG)
    putting = threading.Thread(target=client.put, args=(manifest, BIG))
    putting.start()
    counted = 0
    while putting.is_alive():
        counted += 1
    client.commit(manifest)
    assert counted > 10
