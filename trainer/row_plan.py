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


def first_fit_decreasing(units: list[Unit], length: int, targets: int) -> list[list[Unit]]:
    """Longest first, each into the first row with room for its tokens and its targets."""
    rows: list[list[Unit]] = []
    room: list[tuple[int, int]] = []
    for unit in sorted(units, key=lambda u: -u.length):
        places = (i for i, (a, b) in enumerate(room) if a >= unit.length and b >= unit.targets)
        fits = next(places, len(rows))
        if fits == len(rows):
            rows.append([])
            room.append((length, targets))
        rows[fits].append(unit)
        tokens, slots = room[fits]
        room[fits] = tokens - unit.length, slots - unit.targets
    return rows


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """A row's length, and the rows and targets per row that bound a step of this kind."""

    length: int
    rows: int
    targets: int


def plan_rows(sequences: Sequence[TrainingSequence], config: PackingConfig) -> RowPlan:
    """Choose the row length with the least work, judged by bounds that vary little between steps.

    Responses count as their limit (or the next power of two of the longest one, if that is less),
    not as what was sampled, so that a run settles on one shape.
    """
    if not sequences:
        return RowPlan(length=config.row_tokens or 16, rows=1, targets=1)
    longest = _power_of_two(max(s.response_ids.size for s in sequences))
    prompts: dict[bytes, list[int]] = {}
    for s in sequences:
        key = np.asarray(s.prompt_ids, np.int32).tobytes()
        limit = max(context_size(s), min(longest, s.max_new_tokens) - 1)
        prompts.setdefault(key, [s.prompt_ids.size]).append(limit)
    groups = list(prompts.values())
    shortest = _power_of_two(max(size[0] + max(size[1:]) for size in groups))
    if config.row_tokens:
        candidates = [max(config.row_tokens, shortest)]
    else:
        total = _power_of_two(sum(map(sum, groups)))
        largest = max(shortest, min(total, config.micro_batch_tokens))
        candidates = [shortest << i for i in range((largest // shortest).bit_length())]

    def plan(length: int) -> RowPlan:
        units = [unit for group in groups for unit in _cut(group, length)]
        rows = first_fit_decreasing(units, length, sum(u.targets for u in units))
        most = max(sum(u.targets for u in row) for row in rows)
        return RowPlan(length=length, rows=len(rows), targets=most)

    def work(plan: RowPlan) -> float:
        return plan.rows * plan.length * (1 + plan.length / config.attention_tokens)

    return min(map(plan, candidates), key=work)


def _cut(group: list[int], length: int) -> Iterator[Unit]:
    """Units of one group, given as prompt size and branch sizes, as they would be in full."""
    size = prompt = group[0]
    targets = 0
    for branch in group[1:]:
        if size + branch > length:
            yield Unit(prompt=np.empty(size), targets=targets)
            size, targets = prompt, 0
        size, targets = size + branch, targets + branch + 1
    yield Unit(prompt=np.empty(size), targets=targets)


def settled(actual: int, bound: int, least: int = 1) -> int:
    """The bucket of the bound where that costs at most half more than the actual one's."""
    small, large = bucket(actual, least), bucket(bound, least)
    return large if small <= large <= 1.5 * small else small


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def bucket(n: int, least: int = 1) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that holds n."""
    whole = _power_of_two(max(n, least))
    return whole * 3 // 4 if whole >= 4 and n <= whole * 3 // 4 >= least else whole
