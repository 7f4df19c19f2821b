"""Which pieces a request asks for: whole tensors as the manifest lists them, boxes as they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infra.contracts.errors import DamagedObject
from infra.contracts.manifests import WeightManifest
from infra.weights.flight_wire import Piece
from infra.weights.tensor_file import weights_digest
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
    tensors = whole_tensors(manifest)
    asked: list[str | TensorSlice] = list(tensors if wanted is None else wanted)
    pieces = []
    for item in asked:
        name = item if isinstance(item, str) else item.name
        if name not in tensors:
            raise KeyError(f"weights version {manifest.version} has no tensor '{name}'")
        tensor = tensors[name]
        if isinstance(item, TensorSlice):
            _check(item, tensor)
            if item.shape != tensor.shape:
                tensor = Piece(name=name, dtype=tensor.dtype, shape=item.shape, crc32c=None)
        pieces.append(tensor)
    names = [piece.name for piece in pieces]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tensor {twice} is asked for twice")
    return asked, pieces


def check_digest(manifest: WeightManifest) -> None:
    """Raise ``DamagedObject`` unless the manifest's digest is that of the tensors it lists."""
    found = weights_digest((e.name, e.shape, e.dtype, e.crc32c) for e in manifest.tensors)
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


def _check(box: TensorSlice, tensor: Piece) -> None:
    inside = len(box.start) == len(box.shape) == len(tensor.shape) and all(
        min(start, length) >= 0 and start + length <= whole
        for start, length, whole in zip(box.start, box.shape, tensor.shape, strict=True)
    )
    if not inside:
        raise ValueError(
            f"tensor {box.name}: the box at {box.start} of shape {box.shape} does not lie in a "
            f"tensor of shape {tensor.shape}"
        )
