"""What the emulator of Google Cloud Storage holds and says, and the faults it makes on order."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field

import google_crc32c

MULTIPLE = 256 << 10
"""Every chunk of a resumable upload but the last has a multiple of this size."""
PAGE = 1000


@dataclass(kw_only=True)
class Fault:
    """What goes wrong with the next ``times`` requests of ``method`` whose target has ``part``."""

    method: str
    part: str = ""
    times: int = 1
    status: int = 0
    """Answer this status instead of doing it."""
    lost: bool = False
    """Do it, then close the connection without an answer."""
    act: Callable[[], None] | None = None
    """Done after the request and before its answer: what another writer does at that moment."""
    keep: int | None = None
    """Of a chunk, only so many bytes arrive before the connection breaks."""
    damage: bool = False
    """Flip a bit of the bytes that are sent back."""
    cut: bool = False
    """Close the connection half-way through the answer."""


@dataclass(kw_only=True)
class Stored:
    data: bytes
    generation: int
    metadata: dict[str, str]

    @property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.Checksum(self.data).digest()).decode()


@dataclass(kw_only=True)
class Upload:
    """A resumable upload under way; ``done`` is kept, as Google does for a week."""

    bucket: str
    name: str
    expected: int | None
    metadata: dict[str, str]
    data: bytearray = field(default_factory=bytearray)
    done: Stored | None = None


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def resource(bucket: str, name: str, stored: Stored) -> dict[str, object]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "crc32c": stored.crc32c,
        "metadata": stored.metadata,
    }


def listing(objects: dict[str, Stored], bucket: str, query: dict[str, str]) -> dict[str, object]:
    """One page. ``pageToken`` is the last entry of the page before."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    start, token = query.get("startOffset", ""), query.get("pageToken", "")
    limit = min(int(query.get("maxResults", PAGE)), PAGE)
    items, prefixes, last = [], [], ""
    for name in sorted(objects):
        if not name.startswith(prefix) or name < start:
            continue
        rest = name[len(prefix) :]
        folder = prefix + rest.partition(delimiter)[0] + delimiter if delimiter else ""
        entry = folder if folder and delimiter in rest else name
        if entry <= token or (prefixes and prefixes[-1] == entry):
            continue
        if len(items) + len(prefixes) == limit:
            return {"items": items, "prefixes": prefixes, "nextPageToken": last}
        last = entry
        if entry == name:
            items.append(resource(bucket, name, objects[name]))
        else:
            prefixes.append(entry)
    return {"items": items, "prefixes": prefixes}
