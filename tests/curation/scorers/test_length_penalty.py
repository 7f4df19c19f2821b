import dataclasses

import numpy as np
import pytest

from curation.scorers.length_penalty import LengthPenalty
from infra.contracts.errors import ScorerError
from infra.contracts.records import SamplingParams
from tests.builders import make_prompt, make_rollout


def penalty(scorer, tokens, limit=20):
    rollout = dataclasses.replace(
        make_rollout(tokens=tokens), sampling=SamplingParams(max_new_tokens=limit)
    )
    return scorer.score(rollout, make_prompt()).value


@pytest.mark.parametrize(
    ("tokens", "value"), [(1, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (25, -1.0)]
)
def test_soft_overlong_is_dapos(tokens, value):
    assert penalty(LengthPenalty(max_tokens=20, cache_tokens=4), tokens) == value
    assert penalty(LengthPenalty(), tokens) == value
    assert penalty(LengthPenalty(scale=0.5), tokens) == 0.5 * value


def test_per_token():
    assert penalty(LengthPenalty(kind="per_token", scale=0.5), 3) == -1.5


def test_a_tiny_limit_has_a_slope():
    assert penalty(LengthPenalty(), 1, limit=1) == -1.0
    assert penalty(LengthPenalty(), 0, limit=1) == 0.0


def test_text_alone_cannot_be_measured():
    rollout = dataclasses.replace(make_rollout(), response_ids=None)
    with pytest.raises(ScorerError, match="text only"):
        LengthPenalty().score(rollout, make_prompt())


@pytest.mark.parametrize("bad", [{"scale": -1.0}, {"max_tokens": 2, "cache_tokens": 3}])
def test_bad_settings(bad):
    with pytest.raises(ValueError):
        LengthPenalty(**bad)


def test_array_lengths_only():
    """The penalty looks at the number of ids, not at the text."""
    rollout = dataclasses.replace(make_rollout(tokens=3), response_text="x" * 1000)
    assert LengthPenalty().score(rollout, make_prompt()).components == {"tokens": 3.0}
    assert isinstance(rollout.response_ids, np.ndarray)
