"""Processes of reading threads that follow a publisher which retires old versions."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from infra.storage.local_store import LocalStore
from infra.weights.stored_weights import StoredWeights

VERSIONS, KEPT, TENSORS = 200, 4, 6


def weights_of(version: int) -> dict[str, np.ndarray]:
    """Every element of every tensor is the version's number."""
    return {f"layer{i}": np.full((32, 16), version, np.float32) for i in range(TENSORS)}


def publish_all(folder: str) -> None:
    """Publish every version, keep the newest few."""
    weights = StoredWeights(LocalStore(folder), "test", part_bytes=5000)
    for version in range(VERSIONS):
        weights.publish(version, weights_of(version))
        weights.retire(range(version - KEPT + 1, version + 1))


def read_all(folder: str, threads: int, report: str) -> None:
    """Follow with so many threads until the last version is read; write what went wrong."""
    seen: Counter[str] = Counter()
    problems: list[str] = []

    def follow() -> None:
        weights, last = StoredWeights(LocalStore(folder), "test"), -1
        while last < VERSIONS - 1 and not problems:
            try:
                manifest = weights.latest()
                if manifest is None or manifest.version == last:
                    time.sleep(0.002)  # do not starve the publisher
                    continue
                arrays = weights.fetch(manifest.version)
            except KeyError:  # retired under the reader: it looks again
                seen["retired"] += 1
                continue
            except Exception as e:  # any other error is what the test is after
                problems.append(f"after {last}: {type(e).__name__}: {e}")
                return
            values = {float(value) for array in arrays.values() for value in np.unique(array)}
            if values != {float(manifest.version)} or len(arrays) != TENSORS:
                problems.append(f"version {manifest.version} holds {values}")
            if manifest.version < last:
                problems.append(f"{manifest.version} after {last}")
            last = manifest.version
            seen["fetched"] += 1

    readers = [threading.Thread(target=follow) for _ in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    Path(report).write_text(json.dumps({"problems": problems, **seen}))
