"""Prompts that are prefilled together: which of them, and how they lie in one row. Plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SMALLEST_ROW = 64
"""Fewer sizes to compile (seconds each for 135 M parameters) against a little padding."""


def packs_of(prompts: Sequence[np.ndarray], budget: int) -> list[list[np.ndarray]]:
    """Cut the prompts, in order, into runs of at most ``budget`` tokens; a longer one goes alone.

    A run's cost counts what all its prompts begin with once.
    """
    packs: list[list[np.ndarray]] = []
    total = shared = 0
    for prompt in prompts:
        total += len(prompt) - 1
        shared = min(shared, _common(packs[-1][0], prompt)) if packs else 0
        if not packs or total - shared * len(packs[-1]) > budget:
            packs.append([])
            total = shared = len(prompt) - 1
        packs[-1].append(prompt)
    return packs


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two prompts both begin with, their last tokens left out."""
    length = min(len(a), len(b)) - 1
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def packed_row(pack: Sequence[np.ndarray]) -> tuple[np.ndarray, int, list[int]]:
    """Pack prompts, without their last tokens: first what they share, then each one's own rest.

    Returns:
        int32[4, T] (tokens, positions, segments, prefixes); the shared length; and for each prompt
        where it would have to begin for its own tokens to lie in place.
    """
    shared = min((_common(pack[0], prompt) for prompt in pack[1:]), default=0)
    used = shared + sum(len(prompt) - 1 - shared for prompt in pack)
    row = np.zeros((4, max(SMALLEST_ROW, 1 << max(used - 1, 0).bit_length())), np.int32)
    owns, at = [], shared
    row[:3, :shared] = pack[0][:shared], np.arange(shared), np.ones(shared)
    for i, prompt in enumerate(pack):
        own = prompt[shared:-1]
        columns = row[:, at : at + len(own)]
        columns[:] = own, shared + np.arange(len(own)), np.full(len(own), i + 2), np.ones(len(own))
        owns.append(at - shared)
        at += len(own)
    return row, shared, owns
