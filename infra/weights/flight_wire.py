"""The wire of the weight server: tensors as Arrow record batches, requests and errors as JSON.

One batch is one chunk of one piece (a tensor or a box of one), pieces in the order in which they
were asked for::

    piece  crc32c (of the whole piece)  data (at most 16 MiB)
    0      3735928559                   b"..."

Arrow carries the sender's memory without a copy. A piece that arrives in one chunk is handed out as
a view of what was received, a larger one is put together: one copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import pyarrow as pa
from pyarrow import flight

from infra.contracts.errors import (
    ConfigError,
    DamagedObject,
    Fenced,
    HeadraceError,
    SchemaMismatch,
    StorageError,
)
from infra.contracts.manifests import WeightManifest
from infra.weights import tensor_file
from infra.weights.weight_store import TensorSlice

CHUNK_BYTES = 16 << 20
"""Largest chunk. 4 and 16 MiB measure alike, 1 and 64 MiB are slower; 16 MiB are checksummed in
about 2 ms (with the GIL) and hold almost every tensor of a 135M model whole."""
ALIGNMENT = 64
"""Of received arrays; what XLA needs to take an array without a copy."""
SCHEMA = pa.schema(
    [("piece", pa.int32()), ("crc32c", pa.uint32()), ("data", pa.large_binary())],
)
READ_OPTIONS = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a receiver expects: a tensor, or a box of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc32c: int | None
    """None: a box, checked against the checksum that the sender states."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * tensor_file.dtype_of(self.dtype).itemsize


def send(pieces: Iterable[tuple[np.ndarray, int]]) -> Iterator[pa.RecordBatch]:
    """Cut pieces (bytes, crc32c) into batches that share the pieces' memory."""
    for index, (data, crc) in enumerate(pieces):
        for start in range(0, max(len(data), 1), CHUNK_BYTES):
            yield _batch(index, crc, data[start : start + CHUNK_BYTES])


def receive(
    reader: flight.MetadataRecordBatchReader, expected: Collection[Piece]
) -> dict[str, np.ndarray]:
    """Read exactly the pieces expected, every byte checked, as read-only arrays by name.

    Raises:
        DamagedObject: bytes are missing, too many, or not what the checksum says.
    """
    chunks = _chunks(reader)
    arrays = {}
    for index, piece in enumerate(expected):
        data, stated = _assemble(chunks, index, piece)
        wanted = stated if piece.crc32c is None else piece.crc32c
        found, _ = tensor_file.checksums(data)
        if found != wanted:
            raise DamagedObject(
                f"tensor {piece.name}: crc32c of what arrived is {found:08x}, not {wanted:08x}"
            )
        data.flags.writeable = False
        arrays[piece.name] = data.view(tensor_file.dtype_of(piece.dtype)).reshape(piece.shape)
    if next(chunks, None) is not None:
        raise DamagedObject(f"more bytes arrived than {len(expected)} tensors have")
    return arrays


def to_request(manifest: WeightManifest, asked: Sequence[str | TensorSlice]) -> bytes:
    """A get's ticket: ``{"version":12,"digest":"1f..","asked":["norm",["embed",[0,0],[2,4]]]}``."""
    boxes = [item if isinstance(item, str) else astuple(item) for item in asked]
    tree = {"version": manifest.version, "digest": manifest.digest, "asked": boxes}
    return json.dumps(tree).encode()


def from_request(ticket: bytes) -> tuple[int, str, list[str | TensorSlice]]:
    """Inverse of ``to_request``. Raises ``ValueError`` for anything else."""
    try:
        tree = json.loads(ticket)
        asked = [item if isinstance(item, str) else _box(*item) for item in tree["asked"]]
        return int(tree["version"]), str(tree["digest"]), asked
    except (TypeError, KeyError, ValueError) as e:
        raise ValueError(f"not a request for weights: {ticket[:80]!r}") from e


_KINDS: dict[str, type[Exception]] = {
    "absent": KeyError,
    "request": ValueError,
    "config": ConfigError,
    "fenced": Fenced,
    "damaged": DamagedObject,
    "schema": SchemaMismatch,
    "storage": StorageError,
}
_MARK = "<headrace error>"


def to_flight_error(error: Exception) -> flight.FlightError:
    """What the server raises so that ``from_flight_error`` gives the client the same error."""
    exact = [kind for kind, cls in _KINDS.items() if type(error) is cls]
    near = [kind for kind, cls in _KINDS.items() if isinstance(error, cls)]
    text = str(error.args[0]) if error.args else type(error).__name__
    kind = (exact or near or ["storage"])[0]
    return flight.FlightServerError(_MARK + json.dumps([kind, text]) + _MARK)


def from_flight_error(error: Exception, address: str) -> Exception:
    """One clear line; names the server unless it is the server's own message."""
    text = str(error)
    if _MARK in text:
        kind, message = json.loads(text.split(_MARK)[1])
        return _KINDS[kind](message)
    if isinstance(error, flight.FlightUnauthenticatedError):
        return ConfigError(
            f"{address}: the weight server wants a token and refused the one given (or none was); "
            "give the one it was started with, by file or HEADRACE_WEIGHTS_TOKEN"
        )
    if isinstance(error, flight.FlightTimedOutError):
        return StorageError(f"{address}: the weight server did not answer within the deadline")
    if isinstance(error, flight.FlightUnavailableError):
        return StorageError(f"{address}: no weight server can be reached there: {_first(text)}")
    return StorageError(f"{address}: the weight server failed: {_first(text)}")


def known_errors(error: Exception) -> Exception:
    """The error itself if it is one of ours, else what it means as a bug report on one line."""
    if isinstance(error, HeadraceError | KeyError | ValueError):
        return error
    return StorageError(f"{type(error).__name__}: {error}")


def _batch(index: int, crc: int, data: np.ndarray) -> pa.RecordBatch:
    buffer = pa.py_buffer(data)
    ends = pa.py_buffer(np.array([0, len(data)], np.int64))
    column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, buffer])
    return pa.RecordBatch.from_arrays(
        [pa.array([index], pa.int32()), pa.array([crc], pa.uint32()), column], schema=SCHEMA
    )


def _chunks(reader: flight.MetadataRecordBatchReader) -> Iterator[tuple[int, int, np.ndarray]]:
    """(piece, its crc32c, bytes) of every batch that arrives."""
    if not reader.schema.equals(SCHEMA):
        raise DamagedObject(f"not a stream of weights: its columns are {reader.schema.names}")
    while True:
        try:
            batch = reader.read_chunk().data
        except StopIteration:
            return
        if batch is None or batch.num_rows != 1 or any(c.null_count for c in batch.columns):
            raise DamagedObject("not a stream of weights: one chunk a batch, nothing null")
        ends, data = batch.column(2).buffers()[1:]
        start, end = np.frombuffer(ends, np.int64)[batch.column(2).offset :][:2]
        view = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[start:end]
        yield batch.column(0)[0].as_py(), batch.column(1)[0].as_py(), view


def _assemble(
    chunks: Iterator[tuple[int, int, np.ndarray]], index: int, piece: Piece
) -> tuple[np.ndarray, int]:
    """All bytes of one piece and the checksum its sender states."""
    size, filled = piece.size_bytes, 0
    whole: np.ndarray | None = None
    while True:
        number, crc, data = next(chunks, (None, 0, np.empty(0, np.uint8)))
        if number != index or filled + len(data) > size:
            came = "nothing more" if number is None else f"{len(data)} bytes of piece {number}"
            raise DamagedObject(
                f"tensor {piece.name}: has {size} bytes; after {filled} of them came {came}"
            )
        if len(data) == size:
            return data, crc
        if whole is None:
            whole = np.frombuffer(pa.allocate_buffer(size), np.uint8)
        whole[filled : filled + len(data)] = data
        filled += len(data)
        if filled == size:
            return whole, crc


def _box(name: str, start: Sequence[int], shape: Sequence[int]) -> TensorSlice:
    return TensorSlice(str(name), tuple(map(int, start)), tuple(map(int, shape)))


def _first(text: str) -> str:
    """gRPC adds pages of its own state behind the first sentence."""
    return text.split("with message: ")[-1].split(". gRPC client debug")[0].split("\n")[0][:300]
