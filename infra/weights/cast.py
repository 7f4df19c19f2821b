"""Casting on export: what the trainer holds becomes what is published.

==========  =====================================================================================
float32     every floating array as float32
bfloat16    matrices as bf16; vectors (norms, biases) as they are: few bytes, much harm
int8        matrices as int8 with one float32 scale per row, in ``<name>.scale``; vectors as they
            are. A row of ``[out, in]`` is an output channel. Embeddings are matrices too: a row is
            a token's vector, and under a tied head an output channel. Of an array of more axes
            (stacked experts) every row along the last axis has a scale.
==========  =====================================================================================

For int8, ``q = rint(x / s)`` with ``s = max|row| / 127``, so ``|x - q * s| <= s / 2`` but for
float32 rounding (a relative 2^-16 of it). The store keeps what it is given; ``dequantised`` turns
what ``fetch`` returns back into floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import ml_dtypes
import numpy as np

from infra.contracts.errors import ConfigError, StorageError
from infra.contracts.manifests import WeightManifest

Cast = Literal["float32", "bfloat16", "int8"]
SCALE = ".scale"
_CHUNK_BYTES = 1 << 20
"""Of float32 rows quantised at once: temporaries stay in the processor's cache."""
_SMALLEST = float(np.finfo(np.float32).tiny)


def cast_arrays(arrays: Mapping[str, np.ndarray], cast: Cast) -> dict[str, np.ndarray]:
    """Return the arrays to publish; those that need no cast are the same objects.

    Raises:
        StorageError: int8 of an array that holds NaN or infinity, or two arrays of one name.
    """
    if cast not in get_args(Cast):
        raise ConfigError(f"cast = {cast!r}; choose one of {', '.join(get_args(Cast))}")
    out: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.dtype.kind not in "fV":  # V: bf16 and its kin
            out[name] = array
        elif cast == "float32":
            out[name] = array.astype(np.float32, copy=False)
        elif array.ndim < 2:
            out[name] = array
        elif cast == "bfloat16":
            out[name] = array.astype(ml_dtypes.bfloat16, copy=False)
        elif name + SCALE in arrays:
            raise StorageError(f"tensor {name + SCALE} is there already; rename it to publish int8")
        else:
            out[name], out[name + SCALE] = _quantised(name, array)
    return out


def dequantised(
    arrays: Mapping[str, np.ndarray], manifest: WeightManifest
) -> dict[str, np.ndarray]:
    """Return float arrays from what ``fetch`` gave of this version; only int8 needs work.

    Raises:
        KeyError: a scale was not fetched; fetch ``<name>.scale`` (the same rows) too.
    """
    if manifest.cast != "int8":
        return dict(arrays)
    out = {}
    quantised = {entry.name for entry in manifest.tensors if entry.dtype == "int8"}
    scales = {entry.name for entry in manifest.tensors} & {name + SCALE for name in quantised}
    for name, array in arrays.items():
        if name in scales:
            continue
        if name + SCALE not in scales:
            out[name] = array
            continue
        if name + SCALE not in arrays:
            raise KeyError(f"tensor {name} is int8; fetch {name + SCALE} with it")
        out[name] = array.astype(np.float32)
        out[name] *= arrays[name + SCALE][..., None]
    return out


def _quantised(name: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
    quantised, scales = np.empty(rows.shape, np.int8), np.zeros(len(rows), np.float32)
    step = max(_CHUNK_BYTES // max(4 * rows.shape[1], 1), 1)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step].astype(np.float32)
        largest = np.abs(chunk).max(axis=1, initial=0)
        if not np.isfinite(largest).all():
            raise StorageError(
                f"tensor {name} holds NaN or infinity and cannot be int8; the update diverged"
            )
        scale = np.where(largest > 0, np.maximum(largest / 127, _SMALLEST), 0)
        scales[start : start + step] = scale
        chunk /= np.where(scale > 0, scale, 1)[:, None]
        np.rint(chunk, out=chunk)
        quantised[start : start + step] = chunk
    return quantised.reshape(array.shape), scales.reshape(array.shape[:-1])
