"""The weight server: the newest versions in memory, over Arrow Flight, in front of the store.

The trainer puts a version and, once LATEST has moved in the store, commits it; readers ask for
``latest`` (cheap), a manifest, tensors or boxes of them. A server behind which another one stands
is a relay (``flight_relay``); relays of relays make a tree. Memory: ``keep`` versions, one that is
staged, and one that arrives.

    DoAction latest, manifest, versions, stats, commit      JSON
    DoGet    ``flight_wire.to_request``                     ``flight_wire.SCHEMA``
    DoPut    descriptor: the manifest as JSON               ``flight_wire.SCHEMA``
"""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import flight

from infra.clock import Clock, SystemClock
from infra.contracts.errors import ConfigError, HeadraceError
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.manifests import WeightManifest
from infra.weights import flight_wire, tensor_file
from infra.weights.flight_auth import Credentials, TokenCheck
from infra.weights.flight_pieces import asked_for, check_digest, cut, whole_tensors
from infra.weights.flight_relay import PullThrough
from infra.weights.flight_versions import HeldVersion, HeldVersions
from infra.weights.flight_wire import Piece
from infra.weights.weight_store import TensorSlice, WeightReader

F = TypeVar("F", bound=Callable)


def _answered(method: F) -> F:
    """Let errors cross the wire by kind."""

    @functools.wraps(method)
    def call(self: WeightServer, *args: object) -> object:
        try:
            return method(self, *args)
        except (KeyError, ValueError, HeadraceError) as e:
            raise flight_wire.to_flight_error(e) from None

    return call


class WeightServer(flight.FlightServerBase):
    """Serves as soon as it exists, on its own threads; ``close`` ends it.

    Args:
        listen: ``host:port``; port 0 takes a free one.
        source: what stands behind it: the store, a relay's upstream, or nothing.
        relay: puts are refused, because they belong to the root.
        keep: versions in memory.
        credentials: the token that callers must show; certificate and key for TLS.
        clock: spaces the polls of ``source``.
        poll_secs: ``source`` is asked for its latest version at most this often.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        source: WeightReader | None = None,
        relay: bool = False,
        keep: int = 2,
        credentials: Credentials | None = None,
        clock: Clock | None = None,
        poll_secs: float = 0.25,
    ) -> None:
        credentials = credentials or Credentials()
        tls = bool(credentials.certificate)
        self._relay, self._closing = relay, False
        self._held = HeldVersions(keep)
        self._through = PullThrough(self._held, source, clock or SystemClock(), poll_secs)
        self._counts = {"gets": 0, "puts": 0, "bytes_sent": 0}
        self._count_lock = threading.Lock()
        host = _check_address(listen)
        try:
            super().__init__(
                f"{'grpc+tls' if tls else 'grpc'}://{listen}",
                tls_certificates=[(credentials.certificate, credentials.key)] if tls else None,
                middleware={"token": TokenCheck(credentials.token)} if credentials.token else None,
            )
        except (flight.FlightError, pa.ArrowException, OSError) as e:
            reason = str(e).split("\n")[0][:200]
            raise ConfigError(f"--listen {listen}: the server cannot start: {reason}") from e
        self.address = f"{'grpc+tls' if tls else 'grpc'}://{host}:{self.port}"

    def close(self, grace_secs: float = 0.5) -> bool:
        """Stop serving; answers in flight are cut off at their next chunk.

        Returns whether all had ended within ``grace_secs``. One whose reader takes no more bytes
        ends when the reader's deadline does: Flight cannot be told to cut it off.
        """
        self._closing = True
        ending = threading.Thread(target=self.shutdown, daemon=True)
        ending.start()
        ending.join(grace_secs)
        return not ending.is_alive()

    @_answered
    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterable[bytes]:
        body = action.body.to_pybytes() if action.body is not None else b""
        if action.type == "latest":
            found = self._through.latest()
            return [_json({"version": found.version, "digest": found.digest} if found else {})]
        if action.type == "manifest":
            return [to_json(self._through.manifest(int(body)))]
        if action.type == "versions":
            return [_json({"versions": self._held.versions()})]
        if action.type == "stats":
            return [_json(self.stats())]
        if action.type == "commit":
            self._commit(from_json(WeightManifest, body))
            return [b"{}"]
        raise ValueError(f"a weight server has no action {action.type!r}")

    @_answered
    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        version, digest, asked = flight_wire.from_request(ticket.ticket)
        held = self._through.version(version)
        if held.manifest.digest != digest:
            raise KeyError(f"weights version {version} is {held.manifest.digest}, not {digest}")
        asked, pieces = asked_for(held.manifest, asked)
        self._count("gets", 1)
        self._count("bytes_sent", sum(piece.size_bytes for piece in pieces))
        batches = flight_wire.send(_contents(held, asked, pieces))
        return flight.RecordBatchStream(
            pa.RecordBatchReader.from_batches(flight_wire.SCHEMA, self._until_closed(batches))
        )

    @_answered
    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        self._refuse_relay()
        manifest = from_json(WeightManifest, descriptor.command or b"")
        check_digest(manifest)
        self._held.admit(manifest)
        arrays = flight_wire.receive(reader, whole_tensors(manifest).values())
        self._held.stage(HeldVersion(manifest=manifest, arrays=arrays))
        self._count("puts", 1)

    def stats(self) -> dict[str, object]:
        """Counters since the start, for people and for measurements."""
        with self._count_lock:
            counts = dict(self._counts)
        return counts | {
            "fetches": self._through.fetches,
            "versions": self._held.versions(),
            "last_error": self._through.last_error,
        }

    def _commit(self, manifest: WeightManifest) -> None:
        self._refuse_relay()
        self._through.check(manifest)
        self._held.commit(manifest)

    def _refuse_relay(self) -> None:
        if self._relay:
            raise ConfigError(f"{self.address} is a relay; put weights into the root of its tree")

    def _count(self, name: str, more: int) -> None:
        with self._count_lock:
            self._counts[name] += more

    def _until_closed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self._closing:
                raise flight.FlightUnavailableError("the weight server is closing")
            yield batch


def _contents(
    held: HeldVersion, asked: Iterable[str | TensorSlice], pieces: Iterable[Piece]
) -> Iterator[tuple[np.ndarray, int]]:
    """Bytes and checksum of each piece, made when its turn comes: a cut box may be a copy."""
    for item, piece in zip(asked, pieces, strict=True):
        data = tensor_file.bytes_of(cut(held.arrays[piece.name], item))
        yield data, tensor_file.checksums(data)[0] if piece.crc32c is None else piece.crc32c


def _check_address(listen: str) -> str:
    """Return the host. gRPC reports a taken port in half a page, so it is tried here first."""
    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"--listen {listen}: give host:port, e.g. 127.0.0.1:0 for a free port")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        raise ConfigError(
            f"--listen {listen}: cannot listen there: {e.strerror or e}; give another port, or 0 "
            "for a free one"
        ) from e
    return host


def _json(tree: object) -> bytes:
    return json.dumps(tree).encode()
