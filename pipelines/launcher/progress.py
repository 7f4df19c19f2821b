"""What the launcher knows of a run: read from its store alone, a little more at each poll.

The same facts feed the live table, the stop conditions, the summary and the report:
manifests (what was judged), ledger (what was trained), ``weights/LATEST`` (what was published),
heartbeats (what each role does now).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from infra.contracts.manifests import GroupEntry, LedgerEntry, ShardManifest
from infra.contracts.records import Decision
from infra.heartbeats import read_heartbeats
from infra.ledger.ledger import entries_after
from infra.shards.shard_index import ShardIndex
from infra.storage.object_store import ObjectStore
from infra.storage.run_layout import BLOCK_SIZE
from infra.weights.stored_weights import StoredWeights

RATE_WINDOW_SECS = 60.0
"""Rollouts and tokens per second are means over so much of the newest past."""
ETA_STEPS = 10
"""The time left is estimated from so many of the newest steps."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One ledger step: what it trained on. Step N yields version N."""

    step: int
    at: float
    """Unix seconds at which the step was claimed."""
    groups: int
    rollouts: int
    tokens: int
    reward: float
    """Mean over the groups of their mean reward."""
    pass_rate: float
    """Mean over the groups of the share of rollouts whose first scorer said ``pass``."""
    lag: int
    dropped: int
    violations: int


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """One moment of a run."""

    version: int
    """Newest published version; -1 before the first."""
    steps: tuple[StepFacts, ...]
    rollouts_per_sec: float
    tokens_per_sec: float
    secs_per_step: float | None
    """Median of the newest steps; None before the second step."""
    committed: Mapping[str, int]
    """Groups by decision: ``rollouts``, ``rejects``, ``failures``."""
    reasons: Mapping[str, int]
    """Rejected and failed groups by reason."""
    heartbeats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[StepFacts, ...]:
        """The steps whose version is published."""
        return tuple(s for s in self.steps if s.step <= self.version)


class Progress:
    """Follows one run's store. ``poll`` costs a few listings and reads only what is new."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store = store
        self._weights = StoredWeights(store, run)
        self._shards = ShardIndex(store, decisions=tuple(Decision))
        self._groups: dict[tuple[str, str], GroupEntry] = {}
        self._admitted: dict[int, set[int]] = {}
        self._watermark = 0
        self._steps: list[StepFacts] = []
        self._awaited = 0
        self._recent: deque[tuple[float, int, int]] = deque()
        self._committed: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def poll(self, now: float) -> RunSnapshot:
        """Read what is new and return the moment. ``now``: Unix seconds, for the rates."""
        for manifest in self._shards.poll():  # before the ledger, as what it names is committed
            self._take(manifest)
        self._close_full_blocks()
        for entry in entries_after(self._store, self._steps[-1].step if self._steps else 0):
            known = all(key in self._groups for key in entry.groups)
            if not known and self._awaited != entry.step:
                self._awaited = entry.step  # committed between the two looks: the next poll has it
                break
            self._steps.append(self._facts(entry))
        latest = self._weights.latest()
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_SECS:
            self._recent.popleft()
        span = max(now - self._recent[0][0], 1.0) if self._recent else 1.0
        return RunSnapshot(
            version=-1 if latest is None else latest.version,
            steps=tuple(self._steps),
            rollouts_per_sec=sum(rollouts for _, rollouts, _ in self._recent) / span,
            tokens_per_sec=sum(tokens for _, _, tokens in self._recent) / span,
            secs_per_step=_median_gap([s.at for s in self._steps[-ETA_STEPS - 1 :]]),
            committed=dict(self._committed),
            reasons=dict(self._reasons),
            heartbeats=read_heartbeats(self._store),
        )

    def _take(self, manifest: ShardManifest) -> None:
        ended = self._admitted.setdefault(manifest.block, set())
        for entry in manifest.groups:
            ended.add(entry.admission_index)
            self._committed[manifest.decision.value] += 1
            if manifest.decision is Decision.ACCEPTED:
                self._groups[(entry.group_id, manifest.data_digest)] = entry
            else:
                self._reasons[entry.reason] += 1
        rollouts = sum(entry.rollouts for entry in manifest.groups)
        tokens = sum(entry.tokens for entry in manifest.groups)
        self._recent.append((manifest.created_at, rollouts, tokens))

    def _close_full_blocks(self) -> None:
        """Stop listing blocks whose every group has a record."""
        while len(self._admitted.get(self._watermark, ())) >= BLOCK_SIZE:
            del self._admitted[self._watermark]
            self._watermark += 1
            self._shards.close_blocks_below(self._watermark)

    def _facts(self, entry: LedgerEntry) -> StepFacts:
        groups = [self._groups.pop(key) for key in entry.groups if key in self._groups]
        return StepFacts(
            step=entry.step,
            at=entry.created_at,
            groups=len(groups),
            rollouts=sum(g.rollouts for g in groups),
            tokens=sum(g.tokens for g in groups),
            reward=_mean([g.reward_mean for g in groups]),
            pass_rate=_mean([g.pass_rate for g in groups]),
            lag=entry.lag_max,
            dropped=len(entry.dropped),
            violations=entry.violations,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _median_gap(times: list[float]) -> float | None:
    gaps = sorted(b - a for a, b in pairwise(times))
    return gaps[len(gaps) // 2] if gaps else None
