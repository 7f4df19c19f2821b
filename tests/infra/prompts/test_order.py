"""The order is a bijection per epoch, the same for ever, and another for another seed or epoch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.prompts.order import PromptOrder, permute


@given(size=st.integers(1, 400), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**9))
def test_every_epoch_visits_every_prompt_once(size: int, seed: int, epoch: int) -> None:
    order = PromptOrder(size=size, seed=seed)
    visited = [order.at(epoch * size + i) for i in range(size)]
    assert sorted(visited) == list(range(size))


def test_the_order_never_changes() -> None:
    """Golden: a resumed run must meet the same prompts."""
    order = PromptOrder(size=10, seed=7)
    assert [order.at(i) for i in range(20)] == GOLDEN


GOLDEN = [6, 3, 9, 7, 4, 1, 0, 5, 2, 8, 0, 4, 2, 3, 8, 7, 5, 1, 9, 6]


def test_seeds_and_epochs_differ() -> None:
    first = [PromptOrder(size=50, seed=0).at(i) for i in range(50)]
    assert first != [PromptOrder(size=50, seed=1).at(i) for i in range(50)]
    assert first != [PromptOrder(size=50, seed=0).at(50 + i) for i in range(50)]
    assert first != list(range(50))


def test_without_shuffle_the_order_is_the_sets() -> None:
    order = PromptOrder(size=3, seed=5, shuffle=False)
    assert [order.at(i) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_end() -> None:
    order = PromptOrder(size=3, seed=5, epochs=2)
    assert order.at(5) is not None and order.at(6) is None
    assert PromptOrder(size=0, seed=0).at(0) is None


@pytest.mark.parametrize("size", [2, 3, 5, 12])
def test_places_are_about_evenly_used(size: int) -> None:
    draws = 300 * size
    seen = Counter(permute(0, size, str(key).encode()) for key in range(draws))
    assert set(seen) == set(range(size))
    assert all(240 < count < 360 for count in seen.values())


def test_outside_of_the_set() -> None:
    with pytest.raises(ValueError, match="outside"):
        permute(3, 3, b"")
