"""Which rows of which pieces a box of a tensor needs, and how they come together again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from infra.contracts.manifests import TensorEntry, TensorPiece, WeightManifest
from infra.weights import tensor_file
from infra.weights.manifest_file import Place, piece_shape, pieces_of
from infra.weights.weight_store import TensorSlice


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of one tensor."""

    entry: TensorEntry
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Use:
    """What one piece contributes to a box."""

    place: Place
    piece: TensorPiece
    start: int
    end: int
    """Bytes of the piece: the rows along axis 0 that the box touches."""
    rows: tuple[int, ...]
    """Shape of those rows."""
    inside: tuple[slice, ...]
    """Where in those rows."""
    target: tuple[slice, ...]
    """Where in the box."""


def boxes(
    manifest: WeightManifest, wanted: Iterable[str | TensorSlice] | None, name: str
) -> list[Box]:
    """Look up what is wanted; ``name`` is the version's, for errors.

    Raises:
        KeyError: no such tensor.
        ValueError: a tensor is wanted twice, or a box does not lie in it.
    """
    entries = {entry.name: entry for entry in manifest.tensors}
    found: dict[str, Box] = {}
    for each in entries if wanted is None else wanted:
        key = each if isinstance(each, str) else each.name
        entry = entries.get(key)
        if entry is None:
            raise KeyError(f"{name} has no tensor '{key}'")
        start = (0,) * len(entry.shape) if isinstance(each, str) else tuple(each.start)
        shape = entry.shape if isinstance(each, str) else tuple(each.shape)
        spans = zip(start, shape, entry.shape, strict=False)
        if len(start) != len(entry.shape) or len(shape) != len(start):
            raise ValueError(f"{each}: tensor {key} has {len(entry.shape)} axes; name every one")
        if not all(0 <= first <= first + count <= n for first, count, n in spans):
            raise ValueError(f"{each} does not lie in tensor {key} of shape {list(entry.shape)}")
        if key in found:
            raise ValueError(f"tensor {key} is wanted twice; fetch one box that covers both")
        found[key] = Box(entry=entry, start=start, shape=shape)
    return list(found.values())


def uses(box: Box) -> list[Use]:
    """The pieces that a box touches."""
    entry, size = box.entry, piece_shape(box.entry)
    row_bytes = math.prod(size[1:]) * tensor_file.dtype_of(entry.dtype).itemsize
    found = []
    for index, piece in enumerate(pieces_of(entry)):
        corner = [
            index * size[a] if entry.pieces and a == entry.axis else 0 for a in range(len(size))
        ]
        low = [max(b, c) for b, c in zip(box.start, corner, strict=True)]
        high = [
            min(b + n, c + m) for b, n, c, m in zip(box.start, box.shape, corner, size, strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        inside = [slice(a - c, b - c) for a, b, c in zip(low, high, corner, strict=True)]
        rows = (inside[0].start, inside[0].stop) if size else (0, 1)
        found.append(
            Use(
                place=(entry.name, index),
                piece=piece,
                start=rows[0] * row_bytes,
                end=rows[1] * row_bytes,
                rows=(rows[1] - rows[0], *size[1:]) if size else (),
                inside=(slice(None), *inside[1:]) if size else (),
                target=tuple(
                    slice(a - s, b - s) for a, b, s in zip(low, high, box.start, strict=True)
                ),
            )
        )
    return found


def assemble(box: Box, found: list[Use], rows: Mapping[Place, np.ndarray]) -> np.ndarray:
    """The box from the bytes of each piece's rows: a view if one piece has it all, else a copy."""
    dtype = tensor_file.dtype_of(box.entry.dtype)
    views = [rows[use.place].view(dtype).reshape(use.rows)[use.inside] for use in found]
    if len(views) == 1:
        return views[0]
    array = np.empty(box.shape, dtype)
    for use, view in zip(found, views, strict=True):
        array[use.target] = view
    array.flags.writeable = False
    return array
