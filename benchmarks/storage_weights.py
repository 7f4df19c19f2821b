"""What the weight store costs against a plain file of the same bytes on the same disk.

Everything stays in the page cache and nothing is synced, on either side: what is compared is the
work, not the disk. Each repeat takes all arms in turn; medians are reported.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from infra.storage.local_store import LocalStore
from infra.weights.cast import Cast, cast_arrays
from infra.weights.delta import DeltaPolicy
from infra.weights.stored_weights import StoredWeights

LAYERS, WIDTH, INNER, VOCAB = 30, 576, 1536, 49_152
"""SmolLM2-135M."""
SCALE = 0.02
"""Standard deviation of the random weights: what trained matrices of this size have."""


def make_weights(layers: int = LAYERS, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Random float32 weights with the names and shapes of a small Llama."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, WIDTH), "norm": (WIDTH,)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.q": (WIDTH, WIDTH),
            f"{layer}.k": (WIDTH // 3, WIDTH),
            f"{layer}.v": (WIDTH // 3, WIDTH),
            f"{layer}.o": (WIDTH, WIDTH),
            f"{layer}.gate": (INNER, WIDTH),
            f"{layer}.up": (INNER, WIDTH),
            f"{layer}.down": (WIDTH, INNER),
            f"{layer}.norm": (WIDTH,),
        }
    return {name: SCALE * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def measure_publish_fetch(
    folder: Path | None = None, dtype: Cast = "bfloat16", repeats: int = 5, layers: int = LAYERS
) -> dict[str, float]:
    """Publish and fetch everything, against writing and reading one file of the same bytes.

    Returns:
        Medians in seconds (``fetch_secs`` is a reader's first, all verified, ``fetch_again_secs``
        its next, ``cast_secs`` what comes before a publication), ``bytes``, and the ratios
        ``publish_over_raw_write``, ``fetch_over_raw_read``.
    """
    arrays = make_weights(layers)
    uncast, arrays = arrays, cast_arrays(arrays, dtype)
    times = _Times()
    with tempfile.TemporaryDirectory(dir=folder, prefix="headrace-bench-") as scratch:
        for repeat in range(repeats):
            root = Path(scratch) / str(repeat)
            root.mkdir()
            times.take("raw_write", lambda root=root: _write(root / "raw", arrays))
            times.take("raw_read", lambda root=root: (root / "raw").read_bytes())
            (root / "raw").unlink()
            store = LocalStore(root / "run")
            times.take("publish", lambda s=store: StoredWeights(s, "bench").publish(0, arrays))
            reader = StoredWeights(store, "bench")
            times.take("fetch", lambda r=reader: r.fetch(0))
            times.take("fetch_again", lambda r=reader: r.fetch(0))
            times.take("cast", lambda: cast_arrays(uncast, dtype))
            for part in (root / "run").rglob("*.safetensors"):
                part.unlink()
    secs = times.medians()
    return secs | {
        "bytes": float(sum(array.nbytes for array in arrays.values())),
        "publish_over_raw_write": secs["publish_secs"] / secs["raw_write_secs"],
        "fetch_over_raw_read": secs["fetch_secs"] / secs["raw_read_secs"],
    }


def measure_delta(
    folder: Path | None = None, lr: float = 1e-6, repeats: int = 5, layers: int = LAYERS
) -> dict[str, float]:
    """Publish one Adam step as a bf16 delta, against the same version published full.

    The step moves every weight by ``lr`` up or down, which is what Adam does early on.

    Returns:
        Medians in seconds (``rebuild_secs``: a reader that holds the base verified),
        ``delta_bytes_fraction`` of the full version's bytes, ``changed_fraction`` of all elements,
        ``delta_over_full``: ratio of the two publications' seconds.
    """
    before = make_weights(layers)
    rng = np.random.default_rng(1)
    after = {n: a + lr * rng.choice(np.float32([-1, 1]), a.shape) for n, a in before.items()}
    before, after = cast_arrays(before, "bfloat16"), cast_arrays(after, "bfloat16")
    policy = DeltaPolicy(full_every=1 << 30, max_share=1.0)
    times = _Times()
    with tempfile.TemporaryDirectory(dir=folder, prefix="headrace-bench-") as scratch:
        store = LocalStore(scratch)
        reader = StoredWeights(store, "bench")
        deltas = StoredWeights(store, "bench", deltas=policy)
        deltas.publish(0, before)
        deltas.publish(1, before)  # verifies the base, once
        for repeat in range(repeats):
            version = 2 + 2 * repeat
            times.take("delta", lambda v=version: deltas.publish(v, after))
            reader.fetch(version - 1)
            times.take("rebuild", lambda v=version: reader.fetch(v))
            other = LocalStore(f"{scratch}/full-{repeat}")
            times.take("full", lambda o=other: StoredWeights(o, "bench").publish(0, after))
            full = StoredWeights(other, "bench").manifest(0)
            for part in full.parts:
                other.delete(part.key)
            deltas.publish(version + 1, before)
        manifest = reader.manifest(2)
    secs = times.medians()
    size = sum(array.nbytes for array in after.values())
    return secs | {
        "bytes": float(size),
        "delta_bytes_fraction": sum(part.size_bytes for part in manifest.parts) / size,
        "changed_fraction": sum(d.changed for d in manifest.deltas)
        / sum(array.size for array in after.values()),
        "delta_over_full": secs["delta_secs"] / secs["full_secs"],
    }


class _Times:
    """Seconds per arm, over the repeats."""

    def __init__(self) -> None:
        self._secs: dict[str, list[float]] = {}

    def take(self, arm: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        self._secs.setdefault(f"{arm}_secs", []).append(time.perf_counter() - started)

    def medians(self) -> dict[str, float]:
        return {arm: statistics.median(secs) for arm, secs in self._secs.items()}


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(path, "xb", buffering=0) as file:
        for array in arrays.values():
            file.write(memoryview(array.reshape(-1).view(np.uint8)))
