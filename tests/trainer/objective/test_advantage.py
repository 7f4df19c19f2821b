from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.contracts.errors import ConfigError
from trainer.objective.advantage import check_group_size, group_advantages, step_advantages

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("mean_std", [1.7317, -0.5772, -0.5772, -0.5772]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("none", [1.0, 0.0, 0.0, 0.0]),
        ("max_rl", [3.0, -1.0, -1.0, -1.0]),
        ("best_margin", [1.0, 0.0, 0.0, 0.0]),
        ("one", [1.0] * 4),
        ("zero", [0.0] * 4),
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


STEP = [np.array([1.0, 0.0, 0.0]), np.array([1.0, 1.0]), np.array([0.25, 0.75])]
LENGTHS = [np.array([2, 1, 1]), np.array([1, 3]), np.array([1, 3])]


def of_step(kind, rewards=STEP, **settings):
    return np.concatenate(step_advantages(rewards, LENGTHS, kind, 1e-9, **settings))


def test_a_step_is_compared_with_itself():
    every = np.concatenate(STEP)
    np.testing.assert_allclose(of_step("batch"), (every - every.mean()) / every.std(), rtol=1e-6)
    centred = np.concatenate([r - r.mean() for r in STEP])
    np.testing.assert_allclose(of_step("mean_batch_std"), centred / centred.std(), rtol=1e-6)
    np.testing.assert_allclose(of_step("accepted", accept_above=0.5), every > 0.5)
    # OPO's baseline weighs by length: 2/4, 1, (0.25 + 3 * 0.75) / 4
    baseline = np.repeat([0.5, 1.0, 0.625], [3, 2, 2])
    np.testing.assert_allclose(of_step("opo"), every - baseline)


@pytest.mark.parametrize("kind", ["batch", "mean_batch_std", "opo", "max_rl"])
def test_a_step_of_equal_rewards_teaches_exactly_nothing(kind):
    assert not of_step(kind, [np.full(r.size, 0.1, np.float32) for r in STEP]).any()


@pytest.mark.parametrize("kind", ["batch", "mean_batch_std", "mean"])
def test_an_empty_step_is_no_error(kind):
    assert step_advantages([], [], kind) == []
    assert [v.size for v in step_advantages([np.zeros(0)], [np.zeros(0)], kind)] == [0]
