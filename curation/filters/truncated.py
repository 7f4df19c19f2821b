"""Truncated: rollouts that were cut at the token limit.

Rejects the group where more than ``max_share`` were cut. To keep the group and only take the cut
samples out of the loss, set ``mask_truncated`` in ``[recipe]`` instead (DAPO's overlong filtering).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from curation.scorer import SettingsDigest
from infra.contracts.records import FinishReason, Group


@dataclass(frozen=True, kw_only=True)
class Truncated(SettingsDigest):
    """Rejects with ``truncated`` when the share of cut rollouts is above ``max_share``."""

    name: ClassVar[str] = "truncated"
    version: ClassVar[int] = 1

    max_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.max_share < 1:
            raise ValueError(f"max_share = {self.max_share}; must be in [0, 1)")

    def decide(self, group: Group) -> str:
        cut = sum(r.finish_reason is FinishReason.LENGTH for r in group.rollouts)
        return "truncated" if cut > self.max_share * len(group.rollouts) else ""
