"""Publish each version, or, during a replay, compare it with what was published.

Arrays are views of the device buffers on CPU, so 538 MB are checksummed and written without a copy;
they are dropped before the next step, which would otherwise copy instead of reusing its buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import ml_dtypes
import numpy as np

from infra.contracts.manifests import WeightManifest
from infra.storage.object_store import ObjectStore
from infra.weights import tensor_file
from infra.weights.latest_pointer import LatestPointer, advance_latest
from infra.weights.retention import versions_to_keep
from infra.weights.stored_weights import StoredWeights
from trainer.incarnation import Incarnation
from trainer.loop import StepInfo
from trainer.model.config import ModelConfig, config_facts
from trainer.model.params_io import to_named
from trainer.state import TrainState

REPLAY = "replay"
"""Parent of the first version after a replay that gave other weights than those published."""


class PublishWeights:
    """Puts versions into the weight store, in order, never one at or below LATEST.

    Args:
        store: the run.
        weights: its weight store.
        incarnation: checked before each publication.
        model: written into manifests.
        origin: further facts about the model for manifests: ``hf``, its ``config.json``, and
            ``folder``, where its tokenizer's files are; what an export needs.
        tokenizer_digest: written into manifests.
        dtype: ``float32`` or ``bfloat16``, of the published matrices.
        every: publish versions divisible by it; the last one is published by ``ensure``.
        announce: told each published version (hints to the other roles).
        diverged: a replay before this start already gave other weights.
    """

    def __init__(
        self,
        store: ObjectStore,
        weights: StoredWeights,
        incarnation: Incarnation,
        model: ModelConfig,
        *,
        tokenizer_digest: str,
        dtype: str,
        every: int,
        announce: Callable[[int], None],
        diverged: bool = False,
        origin: Mapping[str, object] | None = None,
    ) -> None:
        self._store, self._weights, self._incarnation = store, weights, incarnation
        self._facts = {
            "model_config": config_facts(model) | dict(origin or {}),
            "tokenizer_digest": tokenizer_digest,
            "incarnation": incarnation.name,
        }
        self._dtype = dtype
        self._every = every
        self._announce = announce
        self._latest: WeightManifest | None = weights.latest()
        self.diverged = diverged
        """The weights at LATEST are not this trainer's; cleared by the next publication."""

    @property
    def latest(self) -> int:
        """Newest published version; -1 before the first."""
        return self._latest.version if self._latest else -1

    def after_step(self, info: StepInfo) -> None:
        started = time.perf_counter()
        if info.version <= self.latest:
            self.compare(info.version, info.state)
        elif info.version % self._every == 0:
            self.ensure(info.version, info.state)
        info.metrics["replay_diverged"] = float(self.diverged)
        info.seconds["publish"] = time.perf_counter() - started

    def ensure(self, version: int, state: TrainState) -> None:
        """Publish ``version`` unless LATEST is there already; make sure that LATEST is whole.

        Raises:
            Fenced: another trainer owns the run.
        """
        if version <= self.latest:
            return self.compare(version, state)
        self._incarnation.check()
        arrays = self._named(state)
        before = self._committed(version)
        if before is not None and before.digest != _digest(arrays):
            # Its manifest was written, the pointer not yet, and then the replay came out otherwise.
            advance_latest(self._store, LatestPointer(version=version, digest=before.digest))
            self._latest, self.diverged = before, True
            return
        parent = REPLAY if self.diverged else (self._latest.digest if self._latest else "")
        optimizer_step = int(state.optimizer_step)
        self._latest = self._weights.publish(
            version, arrays, parent=parent, optimizer_step=optimizer_step, **self._facts
        )
        self.diverged = False
        self._announce(version)

    def compare(self, version: int, state: TrainState) -> None:
        """Note whether the published ``version`` (if it is still there) has these weights."""
        published = self._committed(version)
        if published is None:
            return
        arrays = self._named(state)
        self.diverged = published.digest != _digest(arrays)
        if version == self.latest and not self.diverged:
            # Parts are not forced to disk: a machine crash may have left LATEST damaged.
            self._weights.publish(version, arrays)

    def _named(self, state: TrainState) -> dict[str, np.ndarray]:
        arrays = to_named(state.params)
        if self._dtype == "float32":
            return arrays
        return {n: a.astype(ml_dtypes.bfloat16) if a.ndim > 1 else a for n, a in arrays.items()}

    def _committed(self, version: int) -> WeightManifest | None:
        try:
            return self._weights.manifest(version)
        except KeyError:
            return None


class RetireVersions:
    """Deletes versions nobody needs any more (``infra.weights.retention``).

    Args:
        weights: the weight store.
        keep_versions: how many of the newest stay.
        durable: version of the newest complete checkpoint, or None.
        leased: versions that other roles still use.
    """

    def __init__(
        self,
        weights: StoredWeights,
        keep_versions: int,
        durable: Callable[[], int | None],
        leased: Callable[[], Iterable[int]],
    ) -> None:
        self._weights, self._keep_versions = weights, keep_versions
        self._durable, self._leased = durable, leased

    def after_step(self, info: StepInfo) -> None:
        started = time.perf_counter()
        latest = self._weights.latest()
        if latest is not None and latest.version == info.version:
            keep = versions_to_keep(
                self._weights.versions(),
                latest=latest.version,
                keep_versions=self._keep_versions,
                checkpoint_version=self._durable(),
                leased=self._leased(),
            )
            self._weights.retire(keep)
        info.seconds["retire"] = time.perf_counter() - started


def _digest(arrays: dict[str, np.ndarray]) -> str:
    return tensor_file.weights_digest(t.identity for t in tensor_file.measure(arrays))
