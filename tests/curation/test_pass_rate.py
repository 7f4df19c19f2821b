import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.pass_rate import mean_pass_at_k, pass_at_k, wilson_interval


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"),
    # values of statsmodels.stats.proportion.proportion_confint(method="wilson")
    [(0, 10, 0.0, 0.27753), (5, 10, 0.23659, 0.76341), (96, 96, 0.96153, 1.0), (0, 0, 0, 1)],
)
def test_wilson_known_values(passed, total, low, high):
    assert wilson_interval(passed, total) == pytest.approx((low, high), abs=1e-5)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(case):
    passed, total = case
    low, high = wilson_interval(passed, total)
    assert 0 <= low <= passed / total <= high <= 1
    mirrored = wilson_interval(total - passed, total)
    assert (1 - high, 1 - low) == pytest.approx(mirrored)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n, data):
    passed = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_means_and_bad_input():
    assert mean_pass_at_k([(4, 4), (4, 0)], 1) == 0.5
    for samples, passed, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError):
            pass_at_k(samples, passed, k)
    with pytest.raises(ValueError):
        mean_pass_at_k([], 1)
    with pytest.raises(ValueError):
        wilson_interval(2, 1)
