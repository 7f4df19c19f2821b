"""Zero variance: a group whose task rewards are all equal has no group advantage to learn from.

Equality is exact, on float64 task rewards: a float32 standard deviation of equal numbers can come
out above 0, and shaping would hide the tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from curation.scorer import SettingsDigest
from infra.contracts.records import Group


@dataclass(frozen=True, kw_only=True)
class ZeroVariance(SettingsDigest):
    """Rejects with ``zero_variance`` when all trainable task rewards are equal."""

    name: ClassVar[str] = "zero_variance"
    version: ClassVar[int] = 1

    def decide(self, group: Group) -> str:
        rewards = {j.task_reward for j in group.judgements if j.trainable}
        return "zero_variance" if len(rewards) <= 1 else ""
