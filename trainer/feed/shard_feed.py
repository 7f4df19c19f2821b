"""The feed: from committed shards to the groups of the next step, in admission order.

While it waits it reads the shards that have already come, so that the last group to arrive is the
only one that costs time. It wakes up by hint and polls as the fallback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from infra.admission import StepChoice, choose_step
from infra.contracts.errors import DamagedObject, SchemaMismatch
from infra.contracts.json_codec import from_json
from infra.contracts.manifests import ControlState, ShardManifest
from infra.contracts.records import Group
from infra.ledger.group_index import GroupIndex
from infra.run_config import AdmissionConfig
from infra.shards.shard_reader import read_shard
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore

POLL_SECS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGroups:
    """What one step trains on."""

    choice: StepChoice
    groups: tuple[Group, ...]
    """In training order."""
    digests: tuple[str, ...]
    """Data digest of the shard that each group was read from."""
    read_secs: float
    """What was still to be read when the last group had come."""


class Wakeups(Protocol):
    """What ``infra.hints.HintListener`` promises."""

    def wait(self, timeout_secs: float) -> list[dict]:
        """Return the hints that came; at the latest after ``timeout_secs``."""


class ShardFeed:
    """Groups for the next step.

    Args:
        store: the run.
        config: how many groups a step takes and how old they may be.
        wakeups: wakes the feed when something was committed.
        waiting: called each time the feed finds too little, with the version and whom it waits for
            in words.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: AdmissionConfig,
        wakeups: Wakeups,
        waiting: Callable[[int, str], None],
    ) -> None:
        self._store = store
        self._config = config
        self._wakeups = wakeups
        self._waiting = waiting
        self._index = GroupIndex(store)
        self._shards: dict[str, dict[str, Group]] = {}
        self.damaged = 0
        """Shards that could not be read and were left to the controller."""

    def next(self, version: int, over: Callable[[int], bool]) -> StepGroups | None:
        """Wait for the groups of the step that turns ``version`` into the next.

        Args:
            version: the trainer's own.
            over: asked while there are too few groups, with the number of those waiting; true
                ends the wait.

        Returns:
            The groups, or None if the wait was ended.
        """
        while True:
            control = self._control()
            self._index.refresh()
            waiting = self._index.waiting
            choice = choose_step(
                (copy.entry for copy in waiting.values()),
                [f for f in control.flights if self._index.state_of(f.group_id) is None],
                version,
                self._config,
                next_index=control.next_index,
            )
            if choice.groups and (found := self._read(choice)):
                return found
            if over(len(waiting)):
                return None
            if not choice.groups:
                self._read_ahead()
                self._waiting(version, choice.wait_for)
                self._wakeups.wait(POLL_SECS)

    def read(self, named: Iterable[tuple[str, str]]) -> tuple[Group, ...]:
        """Read the exact copies a ledger entry names: (group id, shard digest).

        Raises:
            StorageError: a shard that a step was made of is gone or damaged.
        """
        self._index.refresh()
        return tuple(self._group(*self._named(group_id, digest)) for group_id, digest in named)

    def _named(self, group_id: str, digest: str) -> tuple[str, ShardManifest]:
        copy = self._index.copy_of(group_id)
        if copy is None or copy.manifest.data_digest != digest:
            raise DamagedObject(
                f"{self._store.url}: the ledger names group {group_id} of shard {digest}, which is "
                "not there; restore the file, the steps cannot be repeated without it"
            )
        return group_id, copy.manifest

    def _control(self) -> ControlState:
        """What the controller has in flight; nothing before its first word."""
        found = self._store.read_with_token(run_layout.CONTROL_STATE)
        name = f"{self._store.url}/{run_layout.CONTROL_STATE}"
        if found is None:
            return ControlState(run="", epoch=0)
        return from_json(ControlState, found[0], name=name)

    def _read(self, choice: StepChoice) -> StepGroups | None:
        """The chosen groups; None if one turned out damaged (the next refresh counts it failed)."""
        groups, digests, started = [], [], time.perf_counter()
        for entry in choice.groups:
            manifest = self._index.waiting[entry.group_id].manifest
            try:
                groups.append(self._group(entry.group_id, manifest))
            except DamagedObject:
                self.damaged += 1  # quarantined by the reader, its group frees its slot
                return None
            digests.append(manifest.data_digest)
        return StepGroups(
            choice=choice,
            groups=tuple(groups),
            digests=tuple(digests),
            read_secs=time.perf_counter() - started,
        )

    def _read_ahead(self) -> None:
        """Read what waits already; forget shards nobody waits for."""
        wanted = {c.manifest.data_digest: c.manifest for c in self._index.waiting.values()}
        self._shards = {d: groups for d, groups in self._shards.items() if d in wanted}
        for manifest in wanted.values():
            try:
                self._shard(manifest)
            except DamagedObject:
                self.damaged += 1

    def _group(self, group_id: str, manifest: ShardManifest) -> Group:
        return self._shard(manifest)[group_id]

    def _shard(self, manifest: ShardManifest) -> dict[str, Group]:
        digest = manifest.data_digest
        if digest not in self._shards:
            if "trainable" not in manifest.capabilities:
                raise SchemaMismatch(
                    f"{self._store.url}/{manifest.data_key}: its rollouts have no token ids or "
                    "log-probs; only shards with the capability 'trainable' can be trained on"
                )
            groups = read_shard(self._store, manifest)
            self._shards[digest] = {group.group_id: group for group in groups}
        return self._shards[digest]
