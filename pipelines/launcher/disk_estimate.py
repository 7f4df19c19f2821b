"""How much disk a run will take at its fullest: pure arithmetic, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infra.contracts.errors import ConfigError
from infra.run_config import SharedConfig

TOKEN_BYTES = 17
"""Per sampled token: id, two float32 log-probs, version and mask, before compression."""
ROLLOUT_BYTES = 2048
"""Per rollout: text, ids, judgement and manifest entry, before compression."""
SPARE_BYTES = 64 * 2**20
"""Logs, metrics, the report."""


@dataclass(frozen=True, kw_only=True)
class DiskEstimate:
    """Bytes at the fullest moment, by what they are for."""

    weights: int
    checkpoints: int
    shards: int
    spare: int = SPARE_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.checkpoints + self.shards + self.spare

    def elsewhere(self) -> DiskEstimate:
        """What this machine needs when the run lies in a bucket: checkpoints in the making."""
        return replace(self, weights=0, shards=0)

    def __str__(self) -> str:
        parts = (
            (self.weights, "weight versions"),
            (self.checkpoints, "checkpoints"),
            (self.shards, "shards"),
        )
        listed = ", ".join(f"{size(amount)} {what}" for amount, what in parts if amount)
        return f"{size(self.total)} ({listed})"


def estimate_disk(
    shared: SharedConfig,
    *,
    version_bytes: int,
    checkpoint_bytes: int,
    keep_versions: int,
    keep_checkpoints: int,
    every_steps: int,
) -> DiskEstimate:
    """Add up one run.

    The versions since the last checkpoint stay besides ``keep_versions`` (a restart replays them),
    and one version and one checkpoint more exist while the next is being written.
    """
    versions = min(max(keep_versions, every_steps + 1), shared.stop.updates) + 1
    groups = shared.stop.updates * shared.admission.groups_per_step
    per_rollout = ROLLOUT_BYTES + TOKEN_BYTES * shared.sampling.max_new_tokens
    return DiskEstimate(
        weights=versions * version_bytes,
        checkpoints=(keep_checkpoints + 1) * checkpoint_bytes,
        shards=groups * shared.sampling.n * per_rollout,
    )


def refuse_if_short(estimate: DiskEstimate, free_bytes: int, where: str) -> None:
    """Raise ``ConfigError`` with both numbers when the estimate does not fit."""
    if estimate.total > free_bytes:
        raise ConfigError(
            f"{where}: not enough disk space: the run needs about {estimate}, free are "
            f"{size(free_bytes)}; free some, choose another --run-dir, or lower "
            "checkpoint.every_steps and checkpoint.keep_checkpoints"
        )


def size(amount: float) -> str:
    """Return bytes for people, e.g. ``1.5 GB`` (powers of 1000, as disks are sold).

    >>> size(1_500_000_000)
    '1.5 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
