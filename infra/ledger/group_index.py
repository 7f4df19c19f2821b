"""Where every group is: committed manifests and the ledger folded into one state per group.

A group may be committed more than once (a retried bundle, an expired lease). The copy named in the
ledger wins; before that rollouts (lowest shard digest) before rejects before failures. All other
copies are superseded: counted, never trained. A copy whose shard is quarantined counts as a
failure, so that its group frees its slot and is never handed to the trainer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from infra.contracts.manifests import GroupEntry, LedgerEntry, ShardManifest
from infra.contracts.records import Decision
from infra.ledger import ledger
from infra.shards.quarantine import quarantined
from infra.shards.shard_index import ShardIndex
from infra.storage.object_store import ObjectStore
from infra.storage.run_layout import BLOCK_SIZE, block_of


class GroupState(StrEnum):
    """Where a group with a record is. One without is in flight, or was never admitted."""

    WAITING = "waiting"
    TRAINED = "trained"
    REJECTED = "rejected"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """One committed copy of a group."""

    entry: GroupEntry
    manifest: ShardManifest


_PREFERENCE = {Decision.ACCEPTED: 0, Decision.REJECTED: 1, Decision.FAILED: 2}
_STATE = {
    Decision.ACCEPTED: GroupState.WAITING,
    Decision.REJECTED: GroupState.REJECTED,
    Decision.FAILED: GroupState.FAILED,
}


class GroupIndex:
    """Follows a run. Cheap to refresh: only what is new is read, only what it touches is refolded.

    Three roles poll one of these every 50-100 ms. Not for several threads.

    Attributes:
        waiting: Committed, trainable and not yet consumed: the copy that counts, by group id, in no
            particular order.
        counts: Number of groups in each state.
        superseded: Committed copies that do not count.
        entries: The ledger so far, in order.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._shards = ShardIndex(store)
        self._copies: dict[str, list[Committed]] = {}
        self._steps: dict[str, list[tuple[int, str]]] = {}
        self._dropped: dict[str, str] = {}
        self._damaged: set[str] = set()
        self._states: dict[str, GroupState] = {}
        self._superseded: dict[str, int] = {}
        self._touched: set[str] = set()
        self._settled: defaultdict[int, set[str]] = defaultdict(set)
        self._watermark = 0
        self.waiting: dict[str, Committed] = {}
        self.counts: Counter[GroupState] = Counter()
        self.superseded = 0
        self.entries: list[LedgerEntry] = []

    def refresh(self) -> bool:
        """Read what is new in the run; True if anything is.

        Raises:
            StorageError: the store failed; the next refresh goes on where this one stopped.
        """
        # Manifests before the ledger: what a step consumed was committed before it.
        for manifest in self._shards.poll():
            for entry in manifest.groups:
                copy = Committed(entry=entry, manifest=manifest)
                self._copies.setdefault(entry.group_id, []).append(copy)
                self._touched.add(entry.group_id)
        self._read_quarantine()
        self._read_ledger()
        touched, self._touched = self._touched, set()
        for group_id in touched:
            self._fold(group_id)
        self._close_settled_blocks()
        return bool(touched)

    def state_of(self, group_id: str) -> GroupState | None:
        """The group's one state; None if nothing is committed about it."""
        return self._states.get(group_id)

    def copy_of(self, group_id: str) -> Committed | None:
        """The copy that counts; None if there is none (or the ledger's is not visible)."""
        copies = self._copies.get(group_id, [])
        if steps := self._steps.get(group_id):
            named = (copy for copy in copies if copy.manifest.data_digest == steps[0][1])
            return next(named, None)
        return min(copies, key=self._rank, default=None)

    def copies_of(self, group_id: str) -> tuple[Committed, ...]:
        """Every committed copy of the group."""
        return tuple(self._copies.get(group_id, ()))

    def steps_of(self, group_id: str) -> tuple[int, ...]:
        """Steps that consumed the group: at most one in a sound run."""
        return tuple(step for step, _ in self._steps.get(group_id, ()))

    def states(self) -> dict[str, GroupState]:
        """The state of every group that has one, by group id (a copy)."""
        return dict(self._states)

    @property
    def last_step(self) -> int:
        """The last step in the ledger; 0 before the first."""
        return self.entries[-1].step if self.entries else 0

    def _rank(self, copy: Committed) -> tuple[bool, int, str]:
        manifest = copy.manifest
        return (
            manifest.data_key in self._damaged,
            _PREFERENCE[manifest.decision],
            manifest.data_digest,
        )

    def _read_quarantine(self) -> None:
        new = set(quarantined(self._store)) - self._damaged
        self._damaged |= new
        if new:
            self._touched.update(
                group_id
                for group_id, copies in self._copies.items()
                if any(copy.manifest.data_key in new for copy in copies)
            )

    def _read_ledger(self) -> None:
        for entry in self._new_entries():
            self.entries.append(entry)
            for group_id, digest in entry.groups:
                self._steps.setdefault(group_id, []).append((entry.step, digest))
            self._dropped.update(entry.dropped)
            self._touched.update(group_id for group_id, _ in (*entry.groups, *entry.dropped))

    def _new_entries(self) -> Iterator[LedgerEntry]:
        if not self.entries:
            yield from ledger.entries_after(self._store, 0)
            return
        # Steps are claimed in order: one failed read instead of listing a long ledger each time.
        while entry := ledger.read(self._store, self.last_step + 1):
            yield entry

    def _fold(self, group_id: str) -> None:
        """Bring one group's state, and all that is counted from it, up to date."""
        copies, copy = self._copies.get(group_id, []), self.copy_of(group_id)
        old, new = self._states.get(group_id), self._state(group_id, copy)
        self._states[group_id] = new
        if old is not None:
            self.counts[old] -= 1
        self.counts[new] += 1
        extra = len(copies) - (copy is not None)
        self.superseded += extra - self._superseded.get(group_id, 0)
        self._superseded[group_id] = extra
        self.waiting.pop(group_id, None)
        if copy is not None and new is GroupState.WAITING:
            self.waiting[group_id] = copy
        if copies:
            settled = self._settled[block_of(copies[0].entry.admission_index)]
            (settled.discard if new is GroupState.WAITING else settled.add)(group_id)

    def _state(self, group_id: str, copy: Committed | None) -> GroupState:
        if group_id in self._steps:
            return GroupState.TRAINED
        if group_id in self._dropped:
            return GroupState.DROPPED
        assert copy is not None, "a group is touched by a copy or by the ledger"
        if copy.manifest.data_key in self._damaged:
            return GroupState.FAILED
        return _STATE[copy.manifest.decision]

    def _close_settled_blocks(self) -> None:
        """Stop polling the blocks whose every group has ended."""
        while len(self._settled[self._watermark]) >= BLOCK_SIZE:
            del self._settled[self._watermark]
            self._watermark += 1
            self._shards.close_blocks_below(self._watermark)
