from __future__ import annotations

import pytest

from infra.weights.retention import reasons_to_keep


@pytest.mark.parametrize(
    "name, arguments, kept",
    [
        ("newest", {"keep_versions": 2, "checkpoint_version": 9}, {8, 9}),
        (
            "chain from the checkpoint",
            {"keep_versions": 2, "checkpoint_version": 5},
            {5, 6, 7, 8, 9},
        ),
        (
            "leased",
            {"keep_versions": 1, "checkpoint_version": 9, "leased": {1: "a", 3: "b"}},
            {1, 3, 9},
        ),
        (
            "leased but gone",
            {"keep_versions": 1, "checkpoint_version": 9, "leased": {77: "a"}},
            {9},
        ),
        ("no checkpoint", {"keep_versions": 1, "checkpoint_version": None}, set(range(10))),
        ("checkpoint between", {"keep_versions": 1, "checkpoint_version": 8, "latest": 9}, {8, 9}),
        (
            "not yet pointed to",
            {"keep_versions": 1, "checkpoint_version": 7, "latest": 8},
            {7, 8, 9},
        ),
        ("checkpoint ahead", {"keep_versions": 2, "checkpoint_version": 9, "latest": 8}, {7, 8, 9}),
        ("more than there are", {"keep_versions": 99, "checkpoint_version": 9}, set(range(10))),
    ],
)
def test_reasons_to_keep(name, arguments, kept):
    assert reasons_to_keep(range(10), **{"latest": 9} | arguments).keys() == kept, name


def test_gaps_and_nothing():
    arguments = {"latest": 40, "keep_versions": 2, "checkpoint_version": 25}
    assert reasons_to_keep([0, 10, 20, 30, 40], **arguments).keys() == {30, 40}
    assert reasons_to_keep([], latest=0, keep_versions=1, checkpoint_version=None) == {}


def test_keep_nothing_is_refused():
    with pytest.raises(ValueError, match="keep_versions = 0"):
        reasons_to_keep([1], latest=1, keep_versions=0, checkpoint_version=1)


def test_every_reason_is_said_and_bases_stay():
    assert reasons_to_keep(
        range(6),
        latest=5,
        keep_versions=2,
        checkpoint_version=5,
        leased={2: "lease eval"},
        bases={1: 0, 4: 3, 5: 3},
    ) == {
        2: "used by lease eval",
        3: "base of 4, base of 5",
        4: "one of the newest 2",
        5: "LATEST, a restart replays it",
    }
