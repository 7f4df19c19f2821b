"""Send one large object to a bucket in chunks that survive a broken connection.

Protocol: every chunk is a PUT with ``Content-Range: bytes 0-9/*`` (the last one names the total).
The answer 308 says how much is stored, 200 that the object exists. After an error the server is
asked how much it has, and only the rest is sent again: no source has to be read twice.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import google_crc32c

MULTIPLE = 256 << 10
"""Every request but the last has to carry a multiple of so many bytes."""
_RESUME = 308


class Answer(Protocol):
    """What is read of an HTTP response."""

    status_code: int
    headers: Any

    def json(self) -> dict[str, Any]:
        """The body: the new object's resource."""


class ChunkIncomplete(Exception):
    """The server has not stored the whole chunk yet: to be tried again."""


def cut(data: bytes | Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """Yield the bytes of ``data`` in chunks of exactly ``size``; the last may be shorter.

    A piece is copied before the next is asked for: its source may use one buffer for all.
    """
    pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    chunk = bytearray()
    for piece in pieces:
        rest = memoryview(piece)
        rest = rest.cast("B") if rest.nbytes else b""
        while rest:
            room = size - len(chunk)
            chunk += rest[:room]
            rest = rest[room:]
            if len(chunk) == size:
                yield bytes(chunk)
                chunk = bytearray()
    if chunk:
        yield bytes(chunk)


def upload_chunks(
    chunks: Iterable[bytes],
    put: Callable[[bytes, dict[str, str]], Answer],
    retrying: Callable[[Callable[[], Answer]], Callable[[], Answer]],
) -> tuple[dict[str, Any], str]:
    """Upload at least one chunk, none of them empty.

    Args:
        put: sends a body with headers to the session; raises on every status but 200, 201, 308.
        retrying: wraps a call so that it is made again after errors that may pass.

    Returns:
        The new object's resource, and the crc32c of what was sent, which the caller compares.
    """
    crc, chunks = google_crc32c.Checksum(), iter(chunks)
    start, carried = 0, b""
    following: bytes | None = next(chunks)
    while following is not None:
        chunk, following = following, next(chunks, None)
        crc.update(chunk)
        checksum = base64.b64encode(crc.digest()).decode()
        last = following is None  # only the last request may name the total, and must
        sender = _Sender(put, carried + chunk, start, checksum if last else None)
        answer = retrying(sender.send)()
        start, carried = sender.stored, sender.rest()
    return answer.json(), checksum


class _Sender:
    """Some bytes of the object. Called again after an error, it first asks how many arrived."""

    def __init__(
        self,
        put: Callable[[bytes, dict[str, str]], Answer],
        data: bytes,
        start: int,
        checksum: str | None,
    ) -> None:
        self.stored = start
        self._put, self._data, self._start = put, data, start
        self._last = checksum is not None
        self._total = str(start + len(data)) if self._last else "*"
        self._headers = {"x-goog-hash": f"crc32c={checksum}"} if self._last else {}
        self._asks = False

    def rest(self) -> bytes:
        """What is not stored yet: after ``send`` less than ``MULTIPLE``, for the next request."""
        return self._data[self.stored - self._start :]

    def send(self) -> Answer:
        """Store all, but for a rest that only the last may send. Raises ``ChunkIncomplete``."""
        if self._asks:
            answer = self._put(b"", {"Content-Range": f"bytes */{self._total}"})
            if self._done(answer):
                return answer
        self._asks = True
        body = self.rest()
        if not self._last:
            body = body[: len(body) // MULTIPLE * MULTIPLE]
        span = f"{self.stored}-{self.stored + len(body) - 1}" if body else "*"
        headers = {"Content-Range": f"bytes {span}/{self._total}"}
        answer = self._put(body, headers | self._headers)
        if self._done(answer):
            return answer
        raise ChunkIncomplete(f"only {self.stored} bytes are stored")

    def _done(self, answer: Answer) -> bool:
        if answer.status_code != _RESUME:
            self.stored = self._start + len(self._data)
            return True
        stored = answer.headers.get("Range")  # "bytes=0-41", absent when there is nothing
        self.stored = int(stored.rpartition("-")[2]) + 1 if stored else 0
        if self.stored < self._start:  # acknowledged before, so we no longer have them
            raise ChunkIncomplete(f"only {self.stored} of {self._start} bytes are still stored")
        return not self._last and len(self.rest()) < MULTIPLE
