"""The weight server's client: a ``WeightReader`` for workers and relays, and the trainer's way in.

Every call has a deadline. Errors are one line that names the server.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from pyarrow import flight

from infra.contracts.errors import ConfigError, DamagedObject, StorageError
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.manifests import TensorEntry, WeightManifest
from infra.weights import flight_wire, tensor_file
from infra.weights.flight_auth import Credentials
from infra.weights.flight_pieces import asked_for, check_digest, whole_tensors
from infra.weights.weight_store import TensorSlice

_OPTIONS = [
    # gRPC waits up to two minutes before it tries a lost server again; our callers wait themselves.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class FlightWeights:
    """Reads from, and puts into, one weight server. For several threads; not across a fork.

    Args:
        address: ``grpc://host:port``, or ``grpc+tls://host:port``.
        credentials: the token to show, and with TLS the authority to trust.
        call_secs: deadline of a call that carries no tensors, and what any other gets on top of its
            bytes. A relay that has to fetch first needs that long too.
        slow_bytes_per_sec: the slowest transfer that still counts as one.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        call_secs: float = 10.0,
        slow_bytes_per_sec: float = 20e6,
    ) -> None:
        if not address.startswith(("grpc://", "grpc+tls://")):
            raise ConfigError(f"{address!r}: a weight server is at grpc://host:port or grpc+tls://")
        self.address = address
        credentials = credentials or Credentials()
        self._headers = credentials.headers
        self._call_secs, self._slow = call_secs, slow_bytes_per_sec
        self._process = os.getpid()
        self._manifests: dict[int, WeightManifest] = {}
        self._lock = threading.Lock()
        with self._errors():
            self._client = flight.FlightClient(
                address, tls_root_certs=credentials.authority or None, generic_options=_OPTIONS
            )

    def latest(self) -> WeightManifest | None:
        """The newest version the server shows; its manifest travels once."""
        found = self._ask("latest")
        if not found:
            return None
        known = self._manifests.get(found["version"])
        if known is None or known.digest != found["digest"]:
            known = self._read_manifest(found["version"])
        return known

    def manifest(self, version: int) -> WeightManifest:
        """Raises ``KeyError`` if neither the server nor what is behind it has that version."""
        return self._manifests.get(version) or self._read_manifest(version)

    def versions(self) -> list[int]:
        """What the server holds in memory, ascending; it may be able to get more."""
        return self._ask("versions")["versions"]

    def fetch(
        self, version: int, wanted: Iterable[str | TensorSlice] | None = None
    ) -> dict[str, np.ndarray]:
        """Read tensors or boxes of them; only those bytes travel. See ``WeightReader``.

        A tensor is checked against the manifest, a box against the checksum sent with it. Arrays
        are views of the received memory, aligned for XLA; those above 16 MiB were copied once.
        """
        manifest = self.manifest(version)
        asked, pieces = asked_for(manifest, wanted)
        if not pieces:
            return {}
        ticket = flight.Ticket(flight_wire.to_request(manifest, asked))
        options = self._deadline(sum(piece.size_bytes for piece in pieces))
        with self._errors():
            reader = self._client.do_get(ticket, options)
            try:
                return flight_wire.receive(reader, pieces)
            except DamagedObject as e:
                reader.cancel()
                raise DamagedObject(f"{self.address}: weights version {version}: {e}") from e

    def put(self, manifest: WeightManifest, arrays: Mapping[str, np.ndarray]) -> None:
        """Send a version, which nobody sees before ``commit``. The arrays are not copied.

        The manifest may be made before the store has the version (``provisional``); then the bytes
        travel while the store writes.

        Raises:
            Fenced: a newer trainer puts here.
            StorageError: the version is not newer than what the server has, or the server is gone.
        """
        pieces = whole_tensors(manifest)
        if pieces.keys() != arrays.keys():
            odd = sorted(pieces.keys() ^ arrays.keys())
            raise ValueError(f"version {manifest.version}: {odd[0]} is only in one of both")
        contents = (
            (tensor_file.bytes_of(np.asarray(arrays[name])), piece.crc32c)
            for name, piece in pieces.items()
        )
        options = self._deadline(sum(piece.size_bytes for piece in pieces.values()))
        with self._errors():
            self._send(manifest, contents, options)

    def commit(self, manifest: WeightManifest) -> None:
        """Show a version that was put, once LATEST in the store is there. Idempotent."""
        self._act("commit", to_json(manifest))

    def stats(self) -> dict[str, object]:
        """The server's counters."""
        return self._ask("stats")

    def close(self) -> None:
        self._client.close()

    def _read_manifest(self, version: int) -> WeightManifest:
        manifest = from_json(WeightManifest, self._act("manifest", str(version).encode()))
        check_digest(manifest)
        if manifest.version != version:
            raise DamagedObject(
                f"{self.address}: asked for weights version {version}, it gave {manifest.version}"
            )
        with self._lock:
            self._manifests[version] = manifest
            while len(self._manifests) > 4:
                del self._manifests[min(self._manifests)]
        return manifest

    def _send(
        self,
        manifest: WeightManifest,
        contents: Iterable[tuple[np.ndarray, int]],
        options: flight.FlightCallOptions,
    ) -> None:
        descriptor = flight.FlightDescriptor.for_command(to_json(manifest))
        writer, _ = self._client.do_put(descriptor, flight_wire.SCHEMA, options)
        try:
            for batch in flight_wire.send(contents):
                writer.write_batch(batch)
        finally:
            writer.close()  # where the server has ended the call, this says why

    def _ask(self, name: str) -> dict:
        answer = self._act(name)
        try:
            return dict(json.loads(answer))
        except (ValueError, TypeError) as e:
            raise DamagedObject(
                f"{self.address}: {answer[:80]!r} is no answer to '{name}'; is it a weight server?"
            ) from e

    def _act(self, name: str, body: bytes = b"") -> bytes:
        with self._errors():
            results = self._client.do_action(flight.Action(name, body), self._deadline(0))
            return b"".join(result.body.to_pybytes() for result in results)

    def _deadline(self, size_bytes: int) -> flight.FlightCallOptions:
        if os.getpid() != self._process:
            # gRPC's threads do not survive a fork: the call would hang, deadline or not.
            raise StorageError(
                f"{self.address}: this client was opened before a fork; open one in the child, and "
                "start the child by spawn"
            )
        return flight.FlightCallOptions(
            timeout=self._call_secs + size_bytes / self._slow,
            headers=self._headers,
            read_options=flight_wire.READ_OPTIONS,
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (flight.FlightError, pa.ArrowException, OSError) as e:
            raise flight_wire.from_flight_error(e, self.address) from e


def provisional(
    run: str,
    version: int,
    arrays: Mapping[str, np.ndarray],
    *,
    incarnation: str = "",
    epoch: int = 0,
) -> WeightManifest:
    """A manifest to ``put`` under while the store still writes; ``commit`` brings the store's own.

    ``incarnation`` and ``epoch`` are what the server fences by.
    """
    tensors = tensor_file.measure(arrays)
    return WeightManifest(
        run=run,
        version=version,
        digest=tensor_file.weights_digest(tensor.identity for tensor in tensors),
        parts=(),
        tensors=tuple(
            TensorEntry(
                name=tensor.name,
                shape=tensor.array.shape,
                dtype=tensor.array.dtype.name,
                part=0,
                offset=0,
                size_bytes=tensor.array.nbytes,
                crc32c=tensor.crc32c,
            )
            for tensor in tensors
        ),
        parent="",
        optimizer_step=0,
        model_config={},
        tokenizer_digest="",
        created_at=0.0,
        incarnation=incarnation,
        epoch=epoch,
    )
