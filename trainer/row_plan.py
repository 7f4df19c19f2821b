"""How long rows are, which unit goes where, and what shape a step settles on.

A *unit* is a prompt with some of its branches, placed whole into a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.credit import TrainingSequence


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """The part of ``[training]`` and of the model that decides shapes."""

    row_tokens: int = 0
    """0: choose."""
    micro_batch_tokens: int = 2048
    attention_tokens: int = 3456
    """Row length at which attention costs as much as the matrices: six times the model's width."""


@dataclass(kw_only=True)
class Branch:
    """One context that responses continue: its tokens, and who predicts from it."""

    context: np.ndarray
    sequences: list[int]


@dataclass(kw_only=True)
class Unit:
    """A prompt and some of its branches: what is placed whole into a row."""

    prompt: np.ndarray
    branches: list[Branch] = field(default_factory=list)
    targets: int = 0

    @property
    def length(self) -> int:
        return self.prompt.size + sum(b.context.size for b in self.branches)


def context_size(s: TrainingSequence) -> int:
    """Response tokens that something trainable is predicted from."""
    trainable = np.flatnonzero(s.loss_mask)
    return int(trainable[-1]) if trainable.size else 0


def first_fit_decreasing(units: list[Unit], length: int) -> list[list[Unit]]:
    """Longest first, each into the first row with room; ties keep their order."""
    rows: list[list[Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda u: -u.length):
        fits = next((i for i, free in enumerate(room) if free >= unit.length), len(rows))
        if fits == len(rows):
            rows.append([])
            room.append(length)
        rows[fits].append(unit)
        room[fits] -= unit.length
    return rows


def choose_length(sequences: Sequence[TrainingSequence], config: PackingConfig) -> int:
    """Return the row length with the least work.

    Judged on bucketed row counts, so that two steps of a run seldom differ. A group's equal
    contexts count once, as they will be packed.
    """
    if not sequences:
        return config.row_tokens or 16
    groups: dict[bytes, dict[bytes, int]] = {}
    for s in sequences:
        prompt = np.asarray(s.prompt_ids, np.int32).tobytes()
        size = context_size(s)
        context = np.asarray(s.response_ids[:size], np.int32).tobytes()
        groups.setdefault(prompt, {b"prompt": s.prompt_ids.size})[context] = size
    sizes = [list(group.values()) for group in groups.values()]
    shortest = power_of_two(max(group[0] + max(group[1:]) for group in sizes))
    if config.row_tokens:
        return max(config.row_tokens, shortest)
    total = power_of_two(sum(map(sum, sizes)))
    largest = max(shortest, min(total, config.micro_batch_tokens))

    def work(length: int) -> float:
        units = [Unit(prompt=np.empty(size)) for group in sizes for size in _cut(group, length)]
        rows = bucket(len(first_fit_decreasing(units, length)))
        return rows * length * (1 + length / config.attention_tokens)

    return min((shortest << i for i in range((largest // shortest).bit_length())), key=work)


def _cut(group: list[int], length: int) -> Iterator[int]:
    """Unit sizes of one group, given as prompt size and branch sizes."""
    size = prompt = group[0]
    for branch in group[1:]:
        if size + branch > length:
            yield size
            size = prompt
        size += branch
    yield size


def most_targets(sequences: Sequence[TrainingSequence]) -> int:
    """Targets if every response were as long as allowed (or as the longest's power of two)."""
    longest = power_of_two(max((s.response_ids.size for s in sequences), default=1))
    return sum(max(s.trainable_tokens, min(longest, s.max_new_tokens)) for s in sequences)


def settled(actual: int, bound: int, least: int = 1) -> int:
    """The bucket of the bound where that costs at most a third more than the actual one's."""
    small, large = bucket(actual, least), bucket(bound, least)
    return large if small <= large <= 4 / 3 * small else small


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def bucket(n: int, least: int = 1) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that holds n."""
    whole = power_of_two(max(n, least))
    return whole * 3 // 4 if whole >= 4 and n <= whole * 3 // 4 >= least else whole
