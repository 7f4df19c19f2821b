"""Publish each version, or, during a replay, compare it with what was published.

Arrays are views of the device buffers on CPU, so 538 MB are checksummed and written without a copy;
they are dropped before the next step, which would otherwise copy instead of reusing its buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from infra.clock import Clock
from infra.contracts.errors import SchemaMismatch
from infra.contracts.manifests import WeightManifest
from infra.storage.object_store import ObjectStore
from infra.weights import tensor_file
from infra.weights.cast import Cast, cast_arrays
from infra.weights.flight_push import FlightPush
from infra.weights.latest_pointer import LatestPointer, advance_latest, claim_latest
from infra.weights.leases import leases
from infra.weights.retention import reasons_to_keep
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
        incarnation: checked before each publication; LATEST is claimed for it at once, so that a
            replaced trainer cannot move it any more.
        model: written into manifests.
        origin: further facts about the model for manifests: ``hf``, its ``config.json``, and
            ``folder``, where its tokenizer's files are; what an export needs.
        tokenizer_digest: written into manifests.
        dtype: of the published matrices; see ``infra.weights.cast``.
        every: publish versions divisible by it; the last one is published by ``ensure``.
        announce: told each published version (hints to the other roles).
        diverged: a replay before this start already gave other weights.
        push: the way into a weight server, besides the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        weights: StoredWeights,
        incarnation: Incarnation,
        model: ModelConfig,
        *,
        tokenizer_digest: str,
        dtype: Cast,
        every: int,
        announce: Callable[[int], None],
        diverged: bool = False,
        origin: Mapping[str, object] | None = None,
        push: FlightPush | None = None,
    ) -> None:
        self._store, self._weights, self._incarnation = store, weights, incarnation
        self._facts = {
            "model_config": config_facts(model) | dict(origin or {}),
            "tokenizer_digest": tokenizer_digest,
            "incarnation": incarnation.name,
            "epoch": incarnation.epoch,
            "cast": dtype,
        }
        self._dtype: Cast = dtype
        self._every = every
        self._announce, self._push = announce, push
        claim_latest(store, incarnation.name, incarnation.epoch)
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
            self.ensure(info.version, info.state, info.updated_at)
        info.metrics["replay_diverged"] = float(self.diverged)
        if self._push is not None:
            info.metrics["push_failures"] = float(self._push.failures)
        info.seconds["publish"] = time.perf_counter() - started

    def ensure(self, version: int, state: TrainState, updated_at: float = 0.0) -> None:
        """Publish ``version`` unless LATEST is there already; make sure that LATEST is whole.

        ``updated_at``: when the optimizer state was, for the manifest.

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
            pointer = LatestPointer(
                version=version,
                digest=before.digest,
                incarnation=self._incarnation.name,
                epoch=self._incarnation.epoch,
            )
            advance_latest(self._store, pointer)
            self._latest, self.diverged = before, True
            return
        parent = REPLAY if self.diverged else (self._latest.digest if self._latest else "")
        optimizer_step = int(state.optimizer_step)
        if self._push is not None:
            who = {"incarnation": self._incarnation.name, "epoch": self._incarnation.epoch}
            self._push.begin(version, arrays, **who)
        self._latest = self._weights.publish(
            version,
            arrays,
            parent=parent,
            optimizer_step=optimizer_step,
            updated_at=updated_at,
            **self._facts,
        )
        if self._push is not None:
            self._push.commit(self._latest)
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
            self._weights.publish(version, arrays, **self._facts)

    def _named(self, state: TrainState) -> dict[str, np.ndarray]:
        return cast_arrays(to_named(state.params), self._dtype)

    def _committed(self, version: int) -> WeightManifest | None:
        try:
            return self._weights.manifest(version)
        except KeyError:
            return None


class RetireVersions:
    """Deletes versions nobody needs any more (``infra.weights.retention``).

    A lease that cannot be read stops this, not the run: ``retire_blocked`` is 1 until it is gone.

    Args:
        store: the run; its leases count.
        weights: the weight store.
        keep_versions: how many of the newest stay.
        durable: version of the newest complete checkpoint, or None.
        leased: version -> who, of those that other roles still use.
        clock: judges leases.
    """

    def __init__(
        self,
        store: ObjectStore,
        weights: StoredWeights,
        keep_versions: int,
        durable: Callable[[], int | None],
        leased: Callable[[], Mapping[int, str]],
        clock: Clock,
    ) -> None:
        self._store, self._weights, self._keep_versions = store, weights, keep_versions
        self._durable, self._leased, self._clock = durable, leased, clock

    def after_step(self, info: StepInfo) -> None:
        started = time.perf_counter()
        latest = self._weights.latest()
        if latest is not None and latest.version == info.version:
            try:
                found = leases(self._store, self._clock.now())
            except SchemaMismatch:
                info.metrics["retire_blocked"] = 1.0
            else:
                self._retire(latest.version, {lease.version: n for n, lease in found.items()})
        info.seconds["retire"] = time.perf_counter() - started

    def _retire(self, latest: int, leased: Mapping[int, str]) -> None:
        keep = reasons_to_keep(
            self._weights.versions(),
            latest=latest,
            keep_versions=self._keep_versions,
            checkpoint_version=self._durable(),
            leased={**self._leased(), **leased},
        )
        self._weights.retire(keep)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    return tensor_file.weights_digest(t.identity for t in tensor_file.measure(arrays))
