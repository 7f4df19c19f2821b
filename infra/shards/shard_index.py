"""Which shards are committed: follow manifests, polling only blocks that can still change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from infra.contracts.errors import DamagedObject
from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Decision
from infra.shards.manifest_reader import decode_manifest
from infra.storage import run_layout
from infra.storage.listing import keys_after
from infra.storage.object_store import ObjectStore
from infra.storage.read_many import read_many

_MANIFEST = ".manifest.json"
_DIGITS = 16
"""So much of a digest tells the shards of a block apart."""


@dataclass(frozen=True, kw_only=True)
class ShardCursor:
    """What a follower has seen: a record that can be stored (``to_marker``) and gone on from.

    A batch job stores it *after* what it made of the shards: then a crash in between repeats work,
    and never skips any. 17 bytes a shard; nothing below ``closed_below``.
    """

    closed_below: int = 0
    """Blocks below are not looked at, whatever is committed there later."""
    seen: dict[str, str] = field(default_factory=dict)
    """Folder of a block -> the first 16 digits of its shards' digests, sorted, joined."""


def committed_after(
    store: ObjectStore,
    cursor: ShardCursor | None = None,
    decisions: tuple[Decision, ...] = tuple(Decision),
) -> tuple[tuple[ShardManifest, ...], ShardCursor]:
    """Return the manifests that ``cursor`` has not seen, and the cursor that has seen them too.

    Every shard comes exactly once along a chain of cursors, also one that is committed late into an
    old block: the cursor remembers names, not times. Within one call they are ordered by block,
    decision and digest; between calls, by when they were seen. A group that was committed twice
    comes twice (``GroupIndex`` tells which copy counts), a quarantined manifest never.

    Raises:
        NewerSchema: a manifest was written by a newer program.
        StorageError: the store failed; the old cursor is still good.
    """
    index = ShardIndex(store, decisions, cursor)
    return index.poll(), index.cursor()


class ShardIndex:
    """Yields every committed manifest once. Two indexes see the same, each in its own time.

    A key counts as seen only when the poll that read its manifest returns, so nothing is lost by an
    error on the way.
    """

    def __init__(
        self,
        store: ObjectStore,
        decisions: tuple[Decision, ...] = tuple(Decision),
        cursor: ShardCursor | None = None,
    ) -> None:
        cursor = cursor or ShardCursor()
        self._store = store
        self._decisions = decisions
        self._watermark = cursor.closed_below
        self._seen: defaultdict[str, set[str]] = defaultdict(set)
        for folder, digits in cursor.seen.items():
            parts = (digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS))
            self._seen[folder] = set(parts)

    def poll(self) -> tuple[ShardManifest, ...]:
        """Return the manifests committed since the last poll, by block, decision and digest.

        A damaged manifest is quarantined and skipped: its groups count as not committed.

        Raises:
            NewerSchema: a manifest was written by a newer program.
            StorageError: the store failed; the next poll tries again.
        """
        keys = [key for decision in self._decisions for key in self._unseen(decision)]
        found = map(self._decode, keys, read_many(self._store, keys))
        manifests = [manifest for manifest in found if manifest is not None]
        self._remember(keys)  # only now: an error above must not lose what was read
        return tuple(sorted(manifests, key=lambda m: (m.block, m.decision.value, m.data_digest)))

    def cursor(self) -> ShardCursor:
        """What was seen so far, to go on from in another process."""
        seen = {folder: "".join(sorted(digits)) for folder, digits in self._seen.items() if digits}
        return ShardCursor(closed_below=self._watermark, seen=seen)

    def close_blocks_below(self, block: int) -> None:
        """Stop looking at blocks below ``block``: nothing that matters can be added to them."""
        self._watermark = max(self._watermark, block)
        for decision in Decision:
            bound = run_layout.block_folder(decision, self._watermark)
            for folder in [f for f in self._seen if f.startswith(f"{decision.value}/")]:
                if folder < bound:
                    del self._seen[folder]

    def _unseen(self, decision: Decision) -> list[str]:
        after = run_layout.block_folder(decision, self._watermark)
        keys = keys_after(self._store, f"{decision.value}/", after=after)
        return [key for key in keys if key.endswith(_MANIFEST) and not self._has_seen(key)]

    def _has_seen(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        return folder in self._seen and name[:_DIGITS] in self._seen[folder]

    def _remember(self, keys: Iterable[str]) -> None:
        for key in keys:
            folder, _, name = key.rpartition("/")
            self._seen[folder].add(name[:_DIGITS])

    def _decode(self, key: str, data: bytes) -> ShardManifest | None:
        try:
            return decode_manifest(self._store, key, data)
        except DamagedObject:  # quarantined
            return None
