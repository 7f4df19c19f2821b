"""Which pieces a request asks for: whole tensors as the manifest lists them, boxes as they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infra.contracts.errors import DamagedObject
from infra.contracts.manifests import WeightManifest
from infra.weights import tensor_file
from infra.weights.boxes import boxes
from infra.weights.flight_wire import Piece
from infra.weights.weight_store import TensorSlice


def whole_tensors(manifest: WeightManifest) -> dict[str, Piece]:
    """Every tensor of a version, by name, in the manifest's order."""
    return {
        entry.name: Piece(
            name=entry.name, dtype=entry.dtype, shape=entry.shape, crc32c=entry.crc32c
        )
        for entry in manifest.tensors
    }


def asked_for(
    manifest: WeightManifest, wanted: Iterable[str | TensorSlice] | None
) -> tuple[list[str | TensorSlice], list[Piece]]:
    """The request spelled out, and what its answer must look like.

    Raises ``KeyError`` for an unknown tensor, ``ValueError`` for a box outside it or a name twice.
    """
    asked: list[str | TensorSlice] = (
        [entry.name for entry in manifest.tensors] if wanted is None else list(wanted)
    )
    pieces = [
        Piece(
            name=box.entry.name,
            dtype=box.entry.dtype,
            shape=box.shape,
            crc32c=box.entry.crc32c if box.shape == box.entry.shape else None,
        )
        for box in boxes(manifest, asked, f"weights version {manifest.version}")
    ]
    return asked, pieces


def check_digest(manifest: WeightManifest) -> None:
    """Raise ``DamagedObject`` unless the digest is that of the tensors, of types we know."""
    unknown = [e.dtype for e in manifest.tensors if not tensor_file.is_known(e.dtype)]
    if unknown:
        raise DamagedObject(f"weights version {manifest.version}: unknown dtype {unknown[0]!r}")
    found = tensor_file.weights_digest(
        (e.name, e.shape, e.dtype, e.crc32c) for e in manifest.tensors
    )
    if found != manifest.digest:
        raise DamagedObject(
            f"the manifest of weights version {manifest.version} says {manifest.digest}; its "
            f"tensors give {found}"
        )


def cut(array: np.ndarray, item: str | TensorSlice) -> np.ndarray:
    """The tensor or its box, as a view."""
    if isinstance(item, str):
        return array
    return array[tuple(slice(s, s + n) for s, n in zip(item.start, item.shape, strict=True))]
