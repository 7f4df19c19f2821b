"""Verified bytes of the pieces of one version, read by range.

Where a store can map its files (``LocalStore``), pieces are views of the mapped part and each block
is verified once per version. Elsewhere only the blocks that are wanted are read, neighbours in one
request, several requests at a time, and verified every time: they travelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from infra.contracts.errors import DamagedObject
from infra.contracts.manifests import BLOCK_BYTES, TensorPiece, WeightManifest
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore
from infra.weights import tensor_file
from infra.weights.manifest_file import Place

_REQUEST_BYTES = 64 << 20
"""A request grows no further; large enough that a round trip does not count."""
_REQUESTS = 8
"""At a time."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks ``first`` to ``last`` (exclusive) of one piece."""

    place: Place
    piece: TensorPiece
    first: int
    last: int

    @property
    def start(self) -> int:
        """Of the bytes, within the piece."""
        return self.first * BLOCK_BYTES

    @property
    def length(self) -> int:
        last = self.last > len(self.piece.blocks)
        return (self.piece.size_bytes if last else self.last * BLOCK_BYTES) - self.start

    def problem(self, data: np.ndarray) -> str:
        """What is wrong with these bytes; empty if nothing is."""
        if len(data) != self.length:
            return f"it should have {self.length} bytes, not {len(data)}"
        ends = (0, *self.piece.blocks, self.piece.crc32c)
        wanted = ends[self.last]
        found = tensor_file.crc32c(data, ends[self.first])
        return "" if found == wanted else f"crc32c is {found:08x}, not {wanted:08x}"


def whole(place: Place, piece: TensorPiece) -> Blocks:
    """All blocks of a piece."""
    return Blocks(place=place, piece=piece, first=0, last=len(piece.blocks) + 1)


def covering(place: Place, piece: TensorPiece, start: int, end: int) -> Blocks:
    """The blocks in which bytes ``start`` to ``end`` of a piece lie; all, if it has no blocks."""
    if not piece.blocks:
        return whole(place, piece)
    first = start // BLOCK_BYTES
    return Blocks(place=place, piece=piece, first=first, last=max(-(-end // BLOCK_BYTES), first))


class Damage(Exception):
    """The object ``key`` is damaged, missing or short."""

    def __init__(self, key: str, text: str, missing: bool = False) -> None:
        super().__init__(text)
        self.key, self.text, self.missing = key, text, missing


def maps(store: ObjectStore) -> bool:
    """Whether a view of an object costs nothing until it is looked at."""
    return isinstance(store, LocalStore)


def read_blocks(
    store: ObjectStore, manifest: WeightManifest, wanted: Iterable[Blocks]
) -> list[np.ndarray]:
    """The bytes (``uint8``) of each, not verified yet. Raises ``Damage`` for missing or short."""
    wanted = list(wanted)
    if maps(store):
        parts = {i: _mapped(store, manifest, i) for i in {each.piece.part for each in wanted}}
        spans = ((parts[each.piece.part], each.piece.offset + each.start) for each in wanted)
        return [
            data[start : start + each.length]
            for (data, start), each in zip(spans, wanted, strict=True)
        ]
    found: list[np.ndarray] = [np.empty(0, np.uint8)] * len(wanted)
    requests = _requests(wanted)
    with ThreadPoolExecutor(max(min(len(requests), _REQUESTS), 1), "weights") as pool:
        answers = pool.map(lambda r: _read(store, manifest, wanted, r), requests)
        for request, data in zip(requests, answers, strict=True):
            base = wanted[request[0]].piece.offset + wanted[request[0]].start
            for index in request:
                start = wanted[index].piece.offset + wanted[index].start - base
                found[index] = data[start : start + wanted[index].length]
    return found


def _requests(wanted: list[Blocks]) -> list[list[int]]:
    """Indices of neighbours, to be read as one range."""
    requests: list[list[int]] = []
    end, size = (-1, -1), 0
    for index in sorted(range(len(wanted)), key=lambda i: _position(wanted[i])):
        each, position = wanted[index], _position(wanted[index])
        if not each.length:
            continue
        if position != end or size + each.length > _REQUEST_BYTES:
            requests.append([])
            size = 0
        requests[-1].append(index)
        size += each.length
        end = (position[0], position[1] + each.length)
    return requests


def _position(blocks: Blocks) -> tuple[int, int]:
    return blocks.piece.part, blocks.piece.offset + blocks.start


def _read(
    store: ObjectStore, manifest: WeightManifest, wanted: list[Blocks], request: list[int]
) -> np.ndarray:
    first = wanted[request[0]]
    key = manifest.parts[first.piece.part].key
    length = sum(wanted[index].length for index in request)
    try:
        data = store.read_range(key, first.piece.offset + first.start, length)
    except KeyError:
        raise Damage(key, "the part is missing", missing=True) from None
    except DamagedObject as e:
        raise Damage(key, f"the part is cut short: {e}") from e
    return np.frombuffer(data, np.uint8)


def _mapped(store: ObjectStore, manifest: WeightManifest, index: int) -> np.ndarray:
    part = manifest.parts[index]
    try:
        data = np.frombuffer(store.view(part.key), np.uint8)
    except KeyError:
        raise Damage(part.key, "the part is missing", missing=True) from None
    if len(data) != part.size_bytes:
        raise Damage(part.key, f"the part has {len(data)} bytes, not {part.size_bytes}")
    return data
