import dataclasses

import pytest

from curation.filters.truncated import Truncated
from curation.filters.zero_variance import ZeroVariance
from infra.contracts.records import FinishReason
from tests.builders import make_group
from tests.contracts.filter_contract import FilterContract


def cut(group, how_many):
    rollouts = tuple(
        dataclasses.replace(r, finish_reason=FinishReason.LENGTH) if i < how_many else r
        for i, r in enumerate(group.rollouts)
    )
    return dataclasses.replace(group, rollouts=rollouts)


def shaped(group, rewards):
    pairs = zip(group.judgements, rewards, strict=True)
    return dataclasses.replace(
        group, judgements=tuple(dataclasses.replace(j, reward=r) for j, r in pairs)
    )


def untrainable(group, index):
    judgements = list(group.judgements)
    judgements[index] = dataclasses.replace(judgements[index], trainable=False)
    return dataclasses.replace(group, judgements=tuple(judgements))


class TestZeroVariance(FilterContract):
    kept = (
        make_group(rewards=(0.0, 1.0), n=2),
        make_group(rewards=(0.1, 0.1 + 1e-16 + 1e-17 * 3), n=2),
        untrainable(make_group(rewards=(0.0, 1.0, 1.0), n=3), 1),
    )
    rejected = (
        (make_group(rewards=(0.1,) * 7, n=7), "zero_variance"),
        (make_group(rewards=(0.0, 0.0), n=2), "zero_variance"),
        (shaped(make_group(rewards=(1.0, 1.0), n=2), (1.0, 0.5)), "zero_variance"),
        (untrainable(make_group(rewards=(0.0, 1.0), n=2), 1), "zero_variance"),
    )

    @pytest.fixture
    def rule(self):
        return ZeroVariance()


class TestTruncated(FilterContract):
    kept = (make_group(n=4), cut(make_group(n=4), 2))
    rejected = ((cut(make_group(n=4), 3), "truncated"), (cut(make_group(n=4), 4), "truncated"))

    @pytest.fixture
    def rule(self):
        return Truncated()


def test_bad_share():
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        Truncated(max_share=1.0)
