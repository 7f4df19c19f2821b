"""Which shards are committed: follow manifests, polling only blocks that can still change."""

from __future__ import annotations

from infra.contracts.errors import NewerSchema, SchemaMismatch
from infra.contracts.json_codec import from_json
from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Decision
from infra.shards.quarantine import quarantine
from infra.storage import run_layout
from infra.storage.listing import keys_after
from infra.storage.object_store import ObjectStore

_MANIFEST = ".manifest.json"


class ShardIndex:
    """Yields every committed manifest once. Two indexes see the same, each in its own time.

    A key counts as seen only when the poll that read its manifest returns, so nothing is lost by an
    error on the way.
    """

    def __init__(self, store: ObjectStore, decisions: tuple[Decision, ...] = tuple(Decision)):
        self._store = store
        self._watermark = 0
        self._seen: dict[Decision, set[str]] = {decision: set() for decision in decisions}

    def poll(self) -> tuple[ShardManifest, ...]:
        """Return the manifests committed since the last poll, by block, decision and digest.

        A damaged manifest is quarantined and skipped: its groups count as not committed.

        Raises:
            NewerSchema: a manifest was written by a newer program.
            StorageError: the store failed; the next poll tries again.
        """
        found: list[ShardManifest | None] = []
        new: dict[Decision, list[str]] = {}
        for decision, seen in self._seen.items():
            after = run_layout.block_folder(decision, self._watermark)
            keys = keys_after(self._store, f"{decision.value}/", after=after)
            new[decision] = [key for key in keys if key.endswith(_MANIFEST) and key not in seen]
            found += map(self._read, new[decision])
        for decision, keys in new.items():  # only now: an error above must not lose what was read
            self._seen[decision].update(keys)
        manifests = [manifest for manifest in found if manifest is not None]
        return tuple(sorted(manifests, key=lambda m: (m.block, m.decision.value, m.data_digest)))

    def close_blocks_below(self, block: int) -> None:
        """Stop looking at blocks below ``block``: nothing that matters can be added to them."""
        self._watermark = max(self._watermark, block)
        for decision, seen in self._seen.items():
            after = run_layout.block_folder(decision, self._watermark)
            self._seen[decision] = {key for key in seen if key > after}

    def _read(self, key: str) -> ShardManifest | None:
        try:
            manifest = from_json(ShardManifest, self._store.read(key))
        except NewerSchema:
            raise
        except SchemaMismatch as e:
            quarantine(self._store, key, str(e))
            return None
        expected = run_layout.shard_manifest(
            manifest.decision, manifest.block, manifest.data_digest
        )
        if key != expected:
            quarantine(self._store, key, f"it describes another shard, {expected}")
            return None
        return manifest
