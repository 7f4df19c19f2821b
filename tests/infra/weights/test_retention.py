from __future__ import annotations

import pytest

from infra.weights.retention import versions_to_keep


@pytest.mark.parametrize(
    "name, arguments, kept",
    [
        ("newest", {"keep_versions": 2, "checkpoint_version": 9}, {8, 9}),
        (
            "chain from the checkpoint",
            {"keep_versions": 2, "checkpoint_version": 5},
            {5, 6, 7, 8, 9},
        ),
        ("leased", {"keep_versions": 1, "checkpoint_version": 9, "leased": [1, 3]}, {1, 3, 9}),
        ("leased but gone", {"keep_versions": 1, "checkpoint_version": 9, "leased": [77]}, {9}),
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
def test_versions_to_keep(name, arguments, kept):
    assert versions_to_keep(range(10), **{"latest": 9} | arguments) == kept, name


def test_gaps_and_nothing():
    arguments = {"latest": 40, "keep_versions": 2, "checkpoint_version": 25}
    assert versions_to_keep([0, 10, 20, 30, 40], **arguments) == {30, 40}
    assert versions_to_keep([], latest=0, keep_versions=1, checkpoint_version=None) == set()


def test_keep_nothing_is_refused():
    with pytest.raises(ValueError, match="keep_versions = 0"):
        versions_to_keep([1], latest=1, keep_versions=0, checkpoint_version=1)
