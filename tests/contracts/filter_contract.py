"""What every filter must keep; subclass, give ``rule``, ``kept`` and ``rejected`` groups."""

from __future__ import annotations

import dataclasses
import random

from infra.contracts.json_codec import to_json
from infra.contracts.records import Group


class FilterContract:
    """``kept``: groups that stay; ``rejected``: (group, reason) pairs."""

    kept: tuple[Group, ...]
    rejected: tuple[tuple[Group, str], ...]

    def test_decisions(self, rule):
        assert [rule.decide(group) for group in self.kept] == [""] * len(self.kept)
        assert [rule.decide(g) for g, _ in self.rejected] == [reason for _, reason in self.rejected]

    def test_the_order_of_rollouts_does_not_matter(self, rule):
        for group in (*self.kept, *(g for g, _ in self.rejected)):
            shuffled = list(group.judgements)
            random.Random(0).shuffle(shuffled)
            mixed = dataclasses.replace(
                group, rollouts=group.rollouts[::-1], judgements=tuple(shuffled)
            )
            assert rule.decide(mixed) == rule.decide(group)

    def test_it_changes_nothing(self, rule):
        for group in (*self.kept, *(g for g, _ in self.rejected)):
            before = to_json(group)
            rule.decide(group)
            assert to_json(group) == before
