"""What the weight server costs against a plain loopback socket, and what a relay saves its root.

Sender and receiver are two processes on each side; the socket's receiver fills one buffer that it
keeps. A Flight get or put is the whole call: request, transfer, every byte checksummed (a put: by
the receiver). Each repeat takes all arms in turn; medians are reported.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

from infra.weights.flight_client import FlightWeights, provisional
from infra.weights.flight_server import WeightServer

_SPAWN = multiprocessing.get_context("spawn")
SIZES = {"bf16": 270_000_000, "fp32": 538_000_000}
"""Bytes of a 135M-parameter model."""


def make_tensors(size_bytes: int) -> dict[str, np.ndarray]:
    """One tensor of a fifth of the bytes, the rest in 210 equal ones: SmolLM2-135M, roughly."""
    rng = np.random.default_rng(0)
    sizes = {"embed": size_bytes // 5} | {f"layer{i}": size_bytes * 4 // 1050 for i in range(210)}
    return {name: rng.integers(0, 256, size, np.uint8) for name, size in sizes.items()}


def measure_flight(size_bytes: int, *, repeats: int = 5) -> dict[str, float]:
    """Get and put one version, against a socket that carries the same bytes.

    Returns:
        Medians in seconds, and ``flight_over_socket`` (get), ``flight_put_over_socket``.
    """
    arrays = make_tensors(size_bytes)
    total = sum(array.nbytes for array in arrays.values())
    flat = np.concatenate(list(arrays.values()))
    buffer = np.zeros(total, np.uint8)
    with _Child(_peer, total) as peer, _Child(_server) as served:
        port = peer.pipe.recv()
        client = FlightWeights(served.pipe.recv())
        versions = iter(range(1 << 30))

        def put() -> None:
            manifest = provisional("bench", next(versions), arrays)  # what publish has done anyway
            started = time.perf_counter()
            client.put(manifest, arrays)
            times["flight_put"].append(time.perf_counter() - started)
            client.commit(manifest)

        times: dict[str, list[float]] = {"flight_put": []}
        for _ in range(repeats + 1):  # the first opens connections and touches memory
            put()
            version = client.latest().version
            arms: dict[str, Callable[[], object]] = {
                "socket_get": lambda: _receive(port, buffer),
                "flight_get": lambda: client.fetch(version),  # noqa: B023
                "socket_put": lambda: _send(port, flat),
            }
            for name, arm in arms.items():
                started = time.perf_counter()
                arm()
                times.setdefault(name, []).append(time.perf_counter() - started)
    secs = {f"{name}_secs": statistics.median(taken[1:]) for name, taken in times.items()}
    return secs | {
        "bytes": float(total),
        "flight_over_socket": secs["flight_get_secs"] / secs["socket_get_secs"],
        "flight_put_over_socket": secs["flight_put_secs"] / secs["socket_put_secs"],
    }


def measure_readers(
    size_bytes: int, *, readers: Sequence[int] = (1, 4, 16), repeats: int = 5
) -> list[dict[str, object]]:
    """Reader processes that all want one new version at once, direct and through one relay.

    Returns:
        Rows of ``readers``, ``path``, median ``secs`` until the last has it, and ``root_bytes``.
    """
    arrays = make_tensors(size_bytes)
    manifest = provisional("bench", 1, arrays)
    rows = []
    with _Child(_server) as served, _Child(_relay) as relay:
        root = served.pipe.recv()
        client = FlightWeights(root)
        client.put(manifest, arrays)
        client.commit(manifest)
        crowd = [_Child(_reader) for _ in range(max(readers))]
        for child in crowd:
            child.pipe.recv()
        for count in readers:
            for path in ("direct", "relay"):
                taken, sent = [], []
                for _ in range(repeats):
                    address = root if path == "direct" else relay.ask(root)
                    before = client.stats()["bytes_sent"]
                    started = time.perf_counter()
                    for child in crowd[:count]:
                        child.pipe.send(address)
                    for child in crowd[:count]:
                        child.pipe.recv()
                    taken.append(time.perf_counter() - started)
                    sent.append(client.stats()["bytes_sent"] - before)
                rows.append(
                    {
                        "readers": count,
                        "path": path,
                        "secs": statistics.median(taken),
                        "root_bytes": statistics.median(sent),
                    }
                )
        for child in crowd:
            child.kill()
    return rows


class _Child:
    """A process with a pipe, killed at the end."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()

    def ask(self, question: object) -> object:
        self.pipe.send(question)
        return self.pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _server(pipe: Connection) -> None:
    server = WeightServer()
    pipe.send(server.address)
    pipe.recv()


def _relay(pipe: Connection) -> None:
    """A new relay, which holds nothing yet, each time an upstream comes through the pipe."""
    server: WeightServer | None = None
    while True:
        upstream = pipe.recv()
        if server is not None:
            server.close()
        server = WeightServer(source=FlightWeights(upstream), relay=True)
        pipe.send(server.address)


def _reader(pipe: Connection) -> None:
    pipe.send("here")
    while True:
        client = FlightWeights(pipe.recv())
        client.fetch(client.latest().version)
        pipe.send("done")
        client.close()


def _peer(pipe: Connection, total: int) -> None:
    """The plain socket's other end: sends or takes ``total`` bytes, as its first byte says."""
    data = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    buffer = np.zeros(total, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            with listener.accept()[0] as connection:
                if connection.recv(1) == b"g":
                    connection.sendall(data)
                else:
                    _fill(connection, buffer)
                    connection.sendall(b"k")


def _receive(port: int, buffer: np.ndarray) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"g")
        _fill(connection, buffer)


def _send(port: int, data: np.ndarray) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"p")
        connection.sendall(data)
        connection.recv(1)


def _fill(connection: socket.socket, buffer: np.ndarray) -> None:
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        filled += connection.recv_into(view[filled:])


def main(argv: list[str]) -> int:
    """Print one JSON object: get and put of both sizes, then the readers of the smaller."""
    result = {name: measure_flight(size) for name, size in SIZES.items()}
    print(json.dumps(result | {"readers": measure_readers(SIZES["bf16"])}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
