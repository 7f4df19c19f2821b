"""``headrace weights RUN gc``: delete what nobody needs, or say what would go and why it stays."""

from __future__ import annotations

import json
import tomllib

from infra.contracts.errors import ConfigError
from infra.heartbeats import read_heartbeats
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.weights.leases import leases
from infra.weights.retention import reasons_to_keep
from infra.weights.stored_weights import StoredWeights

_KEEP_VERSIONS = 4
"""Where ``run.toml`` does not say ``checkpoint.keep_versions``."""


def collect(
    store: ObjectStore,
    weights: StoredWeights,
    location: str,
    now: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Retire versions by the trainer's own rules, from the oldest checkpoint that is still there.

    Raises:
        ConfigError: nothing is published.
        StorageError: a manifest or a lease cannot be read; nothing is deleted.
    """
    versions, latest = weights.versions(), weights.latest()
    if latest is None:
        raise ConfigError(f"{location}: no weights are published yet")
    used = {b["version"]: r for r, b in read_heartbeats(store).items() if b.get("version", -1) >= 0}
    used |= {lease.version: f"lease {name}" for name, lease in leases(store, now).items()}
    reasons = reasons_to_keep(
        versions,
        latest=latest.version,
        keep_versions=_keep_versions(store),
        checkpoint_version=_oldest_checkpoint(store),
        leased=used,
        bases=weights.bases(versions),
    )
    going = [version for version in versions if version not in reasons]
    if not dry_run:
        going = weights.retire(reasons)
    if as_json:
        print(json.dumps({"dry_run": dry_run, "deleted": going, "kept": reasons}))
        return 0
    for version in versions:
        verb = "would be deleted" if dry_run else "deleted"
        print(f"version {version}: {reasons.get(version, verb)}")
    return 0


def _keep_versions(store: ObjectStore) -> int:
    found = store.read_with_token(run_layout.RUN_CONFIG)
    tree = tomllib.loads(found[0].decode()) if found else {}
    return max(int(tree.get("checkpoint", {}).get("keep_versions", _KEEP_VERSIONS)), 1)


def _oldest_checkpoint(store: ObjectStore) -> int | None:
    names = store.list_folders(run_layout.CHECKPOINTS)
    return min((int(name) for name in names if name.isdigit()), default=None)
