from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.contracts.errors import ConfigError
from trainer.objective.advantage import check_group_size, group_advantages

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("mean_std", [1.7317, -0.5772, -0.5772, -0.5772]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("none", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_one_of_four_passed(kind, expected):
    got = group_advantages([1.0, 0.0, 0.0, 0.0], kind)
    np.testing.assert_allclose(got, expected, atol=2e-4)
    assert got.dtype == np.float64


@pytest.mark.parametrize("kind", ["mean", "mean_std", "rloo"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-8, 7.7])
def test_equal_rewards_give_exactly_zero(kind, value):
    """float32 noise around a mean must not become an advantage of order one."""
    assert not group_advantages(np.full(7, value, np.float32), kind).any()


@given(rewards)
def test_rloo_is_the_mean_of_the_others(values):
    r = np.array(values, np.float64)
    others = [r[i] - np.delete(r, i).mean() for i in range(r.size)]
    np.testing.assert_allclose(group_advantages(r, "rloo"), others, atol=1e-9)


@given(rewards)
def test_group_advantages_sum_to_zero(values):
    for kind in ("mean", "mean_std", "rloo"):
        assert abs(group_advantages(values, kind).sum()) < 1e-6


def test_a_single_trajectory_has_no_signal():
    assert group_advantages([1.0], "mean").tolist() == [0.0]


def test_one_sample_with_group_advantages_is_refused_in_one_line():
    with pytest.raises(
        ConfigError, match=r"sampling\.n = 1 .*'rloo'.*set sampling\.n to at least 2"
    ):
        check_group_size("rloo", 1)
    check_group_size("none", 1)
    check_group_size("mean", 2)
