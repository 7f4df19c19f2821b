"""``MANIFEST.json`` of a version: decoded, and refused unless its parts agree with one another."""

from __future__ import annotations

import math

from infra.contracts.errors import DamagedObject
from infra.contracts.json_codec import from_json
from infra.contracts.manifests import BLOCK_BYTES, TensorEntry, TensorPiece, WeightManifest
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.weights import tensor_file

Place = tuple[str, int]
"""Tensor name, number of the piece."""


def decode_manifest(store: ObjectStore, version: int, data: bytes) -> WeightManifest:
    """Decode a version's manifest and check that it fits together.

    Raises:
        SchemaMismatch: it does not decode, or was written by a newer program.
        DamagedObject: what it says cannot be.
    """
    name = f"{store.url.rstrip('/')}/{run_layout.weights_manifest(version)}"
    manifest = from_json(WeightManifest, data, name=name)
    problem = _problem(manifest, version)
    if problem:
        raise DamagedObject(f"{name}: {problem}; it is not used, take another version")
    return manifest


def pieces_of(entry: TensorEntry) -> tuple[TensorPiece, ...]:
    """The pieces of a tensor; of one that is not cut, itself."""
    return entry.pieces or (
        TensorPiece(
            part=entry.part,
            offset=entry.offset,
            size_bytes=entry.size_bytes,
            crc32c=entry.crc32c,
            blocks=entry.blocks,
        ),
    )


def piece_shape(entry: TensorEntry) -> tuple[int, ...]:
    """Shape of each piece."""
    count = max(len(entry.pieces), 1)
    return tuple(n // count if a == entry.axis else n for a, n in enumerate(entry.shape))


def _problem(manifest: WeightManifest, version: int) -> str:
    digest = tensor_file.weights_digest(
        (entry.name, entry.shape, entry.dtype, entry.crc32c) for entry in manifest.tensors
    )
    if (manifest.version, manifest.digest) != (version, digest):
        return (
            f"says version {manifest.version}, digest {manifest.digest}; its tensors give {digest}"
        )
    for entry in manifest.tensors:
        text = _entry_problem(entry, manifest)
        if text:
            return f"says that tensor {entry.name} {text}"
    counts = {entry.name: len(pieces_of(entry)) for entry in manifest.tensors}
    places = {(delta.name, delta.piece) for delta in manifest.deltas}
    if len(counts) != len(manifest.tensors) or len(places) != len(manifest.deltas):
        return "says one thing twice"
    for delta in manifest.deltas:
        if not (
            0 <= delta.piece < counts.get(delta.name, 0)
            and 0 <= delta.part < len(manifest.parts)
            and delta.offset >= 0
            and 0 <= delta.size_bytes <= delta.raw_bytes
            and min(delta.changed, delta.far, delta.wide) >= 0
        ):
            return f"says that tensor {delta.name} changes in a way that cannot be"
    return ""


def _entry_problem(entry: TensorEntry, manifest: WeightManifest) -> str:
    try:
        itemsize = tensor_file.dtype_of(entry.dtype).itemsize
    except KeyError:
        return f"has the unknown dtype {entry.dtype}"
    sizes = [math.prod(entry.shape), math.prod(piece_shape(entry))]
    pieces = pieces_of(entry)
    if min(entry.shape, default=0) < 0 or sizes[1] * len(pieces) != sizes[0]:
        return f"has shape {list(entry.shape)} in {len(pieces)} pieces"
    if entry.pieces and not 0 <= entry.axis < len(entry.shape):
        return f"is cut along axis {entry.axis}"
    if entry.size_bytes != sizes[0] * itemsize:
        return f"has {entry.size_bytes} bytes as {entry.dtype}{list(entry.shape)}"
    lowest = 0 if manifest.base is None else -1
    for piece in pieces:
        if not lowest <= piece.part < len(manifest.parts) or piece.offset < 0:
            return f"lies in part {piece.part} of {len(manifest.parts)} at {piece.offset}"
        blocks = max(math.ceil(piece.size_bytes / BLOCK_BYTES), 1)
        if piece.size_bytes != sizes[1] * itemsize or len(piece.blocks) not in (0, blocks - 1):
            return f"has a piece of {piece.size_bytes} bytes, {len(piece.blocks)} block checksums"
    return ""
