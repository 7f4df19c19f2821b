"""What the weight server's tests share: arrays that tell their version, and children to kill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from infra.contracts.manifests import WeightManifest
from infra.weights.flight_client import FlightWeights, provisional

SPAWN = multiprocessing.get_context("spawn")
"""gRPC does not survive a fork."""


def make_arrays(version: int, rows: int = 6) -> dict[str, np.ndarray]:
    """Types and shapes that go wrong easily; every value depends on the version."""
    values = np.arange(rows * 4).reshape(rows, 4) + version
    return {
        "embed": values.astype("f4"),
        "half": values.astype(ml_dtypes.bfloat16),
        "scalar": np.array(version, dtype="i8"),
        "empty": np.zeros((0, 4), "f4"),
        "turned": np.asfortranarray(values.astype("i2")),
        "big_endian": np.arange(4, dtype=">i4") + version,
        "flag": np.array([True, bool(version % 2)]),
    }


def make_manifest(
    version: int, arrays: Mapping[str, np.ndarray] | None = None, *, by: str = "i1", epoch: int = 1
) -> WeightManifest:
    made = provisional("demo", version, arrays or make_arrays(version), incarnation=by, epoch=epoch)
    return replace(made, optimizer_step=version)


def publish(client: FlightWeights, version: int) -> WeightManifest:
    """Put and commit, as a trainer does around the store."""
    manifest = make_manifest(version)
    client.put(manifest, make_arrays(version))
    client.commit(manifest)
    return manifest


def assert_same(fetched: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> None:
    assert fetched.keys() == arrays.keys()
    for name, array in arrays.items():
        got = fetched[name]
        assert (got.shape, got.dtype.name) == (array.shape, array.dtype.name), name
        assert np.array_equal(got, array) and not got.flags.writeable, name


class Child:
    """A process that runs ``target(pipe, *arguments)`` and is killed at the end."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
