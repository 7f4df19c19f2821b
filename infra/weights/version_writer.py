"""Writes the parts of a version: everything, or only what changed against a base.

Parts are named by their content and created if absent, so a repeated publication finds what a dead
one left; what is there under that name and is not the same (a machine crash) is written again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from infra.contracts.ids import content_id
from infra.contracts.manifests import (
    BaseVersion,
    TensorDelta,
    TensorEntry,
    TensorPiece,
    WeightManifest,
    WeightPart,
)
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.weights import delta, tensor_file
from infra.weights.delta import Change, DeltaPolicy
from infra.weights.manifest_file import Place, pieces_of
from infra.weights.tensor_file import Piece, Tensor
from infra.weights.weight_store import Cuts

Contents = Callable[[], Iterable[bytes | memoryview]]
_CODERS = min(os.cpu_count() or 1, 4)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the manifest says about a version's bytes."""

    parts: tuple[WeightPart, ...]
    tensors: tuple[TensorEntry, ...]
    base: BaseVersion | None = None
    deltas: tuple[TensorDelta, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a delta version holds: changed pieces encoded, and those that are stored whole."""

    base: BaseVersion
    changes: dict[Place, Change]
    entire: frozenset[Place]


class VersionWriter:
    """Puts parts into the store.

    Args:
        store: the run.
        part_bytes: size above which a further part begins.
    """

    def __init__(self, store: ObjectStore, part_bytes: int) -> None:
        self._store, self._part_bytes = store, part_bytes

    def write(
        self,
        version: int,
        tensors: list[Tensor],
        changes: Changes | None = None,
        only: Collection[str] | None = None,
    ) -> Written:
        """Write a version's parts; with ``changes`` only those.

        Args:
            version: the folder.
            tensors: all of them.
            changes: against a base; None: a full version.
            only: keys that a committed manifest names; others are not written.
        """
        parts: list[WeightPart] = []
        places: dict[Place, tuple[int, int]] = {}
        for group in tensor_file.split(tensors, self._part_bytes):
            if changes is not None:
                group = [p for p in group if (p.name, p.index) in changes.entire]
            if not group:
                continue
            header, offsets = tensor_file.lay_out(group)
            name = tensor_file.part_name(header, (piece.crc32c for piece in group))
            part = WeightPart(
                key=run_layout.weights_part(version, name),
                size_bytes=len(header) + sum(piece.array.nbytes for piece in group),
            )
            if only is None or part.key in only:
                self._put(part.key, lambda h=header, g=group: tensor_file.contents(h, g))
            for piece, offset in zip(group, offsets, strict=True):
                places[piece.name, piece.index] = len(parts), offset
            parts.append(part)
        entries = tuple(_entry(tensor, places) for tensor in tensors)
        if changes is None:
            return Written(parts=tuple(parts), tensors=entries)
        deltas, blobs = _lay_out_deltas(changes, len(parts))
        if blobs:
            key = run_layout.weights_delta(
                version, content_id("delta", changes.base.digest, *(d.crc32c for d in deltas))
            )
            if only is None or key in only:
                self._put(key, lambda: blobs)
            parts.append(WeightPart(key=key, size_bytes=sum(map(len, blobs))))
        return Written(parts=tuple(parts), tensors=entries, base=changes.base, deltas=tuple(deltas))

    def _put(self, key: str, contents: Contents) -> None:
        if self._store.create(key, contents(), durable=False):
            return
        if not _same(np.frombuffer(self._store.view(key), np.uint8), contents()):
            self._store.delete(key)
            self._store.create(key, contents(), durable=False)


def cuts_of(manifest: WeightManifest) -> Cuts:
    """How the tensors of a version are cut."""
    return {e.name: (e.axis, len(e.pieces)) for e in manifest.tensors if e.pieces}


def find_changes(
    base: WeightManifest,
    old: Mapping[Place, np.ndarray],
    tensors: list[Tensor],
    policy: DeltaPolicy,
) -> Changes | None:
    """Compare with the base's pieces; None if a full version is the better choice.

    Pieces are encoded on up to four threads (numpy and zstd let go of the interpreter).
    """
    before = {
        (entry.name, index): (entry, piece)
        for entry in base.tensors
        for index, piece in enumerate(pieces_of(entry))
    }
    room = policy.max_share * sum(tensor.array.nbytes for tensor in tensors)
    changes: dict[Place, Change] = {}
    entire: set[Place] = set()

    def compare(each: tuple[Tensor, Piece]) -> tuple[Piece, Change | None]:
        tensor, piece = each
        place = piece.name, piece.index
        entry = before[place][0] if place in before else None
        if entry is None or not _alike(entry, tensor):
            return piece, None
        integers = f"<u{piece.array.dtype.itemsize}"
        return piece, delta.encode(old[place].view(integers), piece.bytes().view(integers))

    pool = ThreadPoolExecutor(_CODERS, "delta")
    try:
        for piece, change in pool.map(compare, ((t, p) for t in tensors for p in t.pieces)):
            place = piece.name, piece.index
            if change is None or len(change.data) > policy.max_share * piece.array.nbytes:
                entire.add(place)
                room -= piece.array.nbytes
            elif change.changed:
                changes[place] = change
                room -= len(change.data)
            if room < 0:
                return None
    finally:
        pool.shutdown(cancel_futures=True)
    named = BaseVersion(version=base.version, digest=base.digest)
    return Changes(base=named, changes=changes, entire=frozenset(entire))


def _alike(entry: TensorEntry, tensor: Tensor) -> bool:
    kind = tensor.array.shape, tensor.array.dtype.name, len(tensor.pieces)
    if kind != (entry.shape, entry.dtype, len(pieces_of(entry))):
        return False
    return not entry.pieces or entry.axis == tensor.axis


def _entry(tensor: Tensor, places: Mapping[Place, tuple[int, int]]) -> TensorEntry:
    pieces = []
    for piece in tensor.pieces:
        part, offset = places.get((piece.name, piece.index), (-1, 0))
        pieces.append(
            TensorPiece(
                part=part,
                offset=offset,
                size_bytes=piece.array.nbytes,
                crc32c=piece.crc32c,
                blocks=piece.blocks,
            )
        )
    first = pieces[0]
    entry = TensorEntry(
        name=tensor.name,
        shape=tensor.array.shape,
        dtype=tensor.array.dtype.name,
        part=first.part,
        offset=first.offset,
        size_bytes=tensor.array.nbytes,
        crc32c=tensor.crc32c,
        blocks=first.blocks,
    )
    if len(pieces) == 1:
        return entry
    return replace(entry, blocks=(), axis=tensor.axis, pieces=tuple(pieces))


def _lay_out_deltas(changes: Changes, part: int) -> tuple[list[TensorDelta], list[bytes]]:
    deltas, blobs, offset = [], [], 0
    for (name, index), change in sorted(changes.changes.items()):
        crc = tensor_file.crc32c(np.frombuffer(change.data, np.uint8))
        deltas.append(
            TensorDelta(
                name=name,
                piece=index,
                part=part,
                offset=offset,
                size_bytes=len(change.data),
                crc32c=crc,
                raw_bytes=change.raw_bytes,
                changed=change.changed,
                far=change.far,
                wide=change.wide,
            )
        )
        blobs.append(change.data)
        offset += len(change.data)
    return deltas, blobs


def _same(data: np.ndarray, contents: Iterable[bytes | memoryview]) -> bool:
    """Whether an object's bytes are these."""
    at = 0
    for piece in contents:
        wanted = np.frombuffer(piece, np.uint8)
        if not np.array_equal(data[at : at + len(wanted)], wanted):
            return False
        at += len(wanted)
    return at == len(data)
