"""The weight store against Orbax: the same tensors saved and restored, in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.storage_weights import make_weights
from infra.storage.local_store import LocalStore
from infra.weights.stored_weights import StoredWeights


def measure_orbax(repeats: int = 5) -> dict[str, float]:
    """Publish and fetch 135 M float32 parameters, and save and restore them with Orbax.

    Returns:
        Medians in seconds, and the ratios ``publish_over_orbax_save``,
        ``fetch_over_orbax_restore``. Both ends are host memory; a fetch is verified.
    """
    arrays = make_weights()
    like = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()}
    secs: dict[str, list[float]] = {}
    with ocp.StandardCheckpointer() as checkpointer:

        def save(path: Path) -> None:
            checkpointer.save(path, arrays)
            checkpointer.wait_until_finished()

        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
                weights = StoredWeights(LocalStore(f"{folder}/run"), "bench")
                path = Path(folder) / "orbax"
                arms: dict[str, Callable[[], object]] = {
                    "publish": lambda w=weights: w.publish(0, arrays),
                    "orbax_save": lambda p=path: save(p),
                    "fetch": lambda f=folder: _touched(
                        StoredWeights(LocalStore(f"{f}/run"), "bench").fetch(0)
                    ),
                    "orbax_restore": lambda p=path: jax.block_until_ready(
                        checkpointer.restore(p, like)
                    ),
                }
                for name, work in arms.items():
                    started = time.perf_counter()
                    work()
                    secs.setdefault(f"{name}_secs", []).append(time.perf_counter() - started)
    medians = {name: statistics.median(taken) for name, taken in secs.items()}
    return medians | {
        "publish_over_orbax_save": medians["publish_secs"] / medians["orbax_save_secs"],
        "fetch_over_orbax_restore": medians["fetch_secs"] / medians["orbax_restore_secs"],
    }


def _touched(arrays: dict[str, np.ndarray]) -> float:
    """Read one number of each tensor; the fetch has read every byte already, to check it."""
    return sum(float(array.flat[0]) for array in arrays.values())
