"""Shared-prefix packing: a group's prompt stands once in a row and its responses branch from it.

    row   : [prompt A][resp A1][resp A2]...[prompt B][resp B1]...[padding]
    segment  1 1 1 1   2 2 2    3 3         4 4 4     5 5 5         0
    prefix   0 0 0 0   1 1 1    1 1         0 0 0     4 4 4         0

The model lets a token attend to its own segment and its prefix, so each response sees exactly its
prompt and itself, and the prompt is computed once instead of n times. What nothing is predicted
from (a response's last token) is not computed at all, and responses that are equal up to there
share one branch. A group that fits no row is cut into several units that repeat the prompt.

The shapes are a pure function of the step's data, coarse enough that a run compiles a few times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.batch import Batch
from trainer.credit import TrainingSequence


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    row_tokens: int = 0
    """0: choose."""
    micro_batch_tokens: int = 2048
    attention_tokens: int = 3456
    """Row length at which attention costs as much as the matrices: six times the model's width."""


@dataclass(kw_only=True)
class _Branch:
    """One context that responses continue: its tokens, and who predicts from it."""

    context: np.ndarray
    sequences: list[int]


@dataclass(kw_only=True)
class _Unit:
    """A prompt and some of its branches: what is placed whole into a row."""

    prompt: np.ndarray
    branches: list[_Branch] = field(default_factory=list)
    targets: int = 0

    @property
    def length(self) -> int:
        return self.prompt.size + sum(b.context.size for b in self.branches)


def pack(
    sequences: Sequence[TrainingSequence],
    config: PackingConfig,
    *,
    denominator: float,
    step: int,
    on_policy: bool = True,
) -> Batch:
    """Lay the sequences out in rows (numpy). Every trainable token becomes exactly one target.

    Args:
        sequences: any mixture of prompts; equal prompts are found by their ids.
        denominator: the aggregation's, over the whole optimizer call.
        step: the version this step yields.
        on_policy: see ``Batch``.
    """
    length = config.row_tokens or _row_length(sequences, config)
    longest = max((_span(s) for s in sequences), default=1)
    length = max(length, longest if longest <= length else _power_of_two(longest))
    rows = _first_fit_decreasing(list(_units(sequences, length)), length)
    per_micro = max(1, config.micro_batch_tokens // length)
    targets = _bucket(max((sum(u.targets for u in row) for row in rows), default=1), least=16)
    if len(rows) <= per_micro:
        real, shape = 1, (1, min(_bucket(len(rows)), per_micro))
    else:
        real = -(-len(rows) // per_micro)
        shape = (_bucket(real), per_micro)
    batch = _empty(shape, length, targets, denominator, step, real, on_policy)
    for i, row in enumerate(rows):
        _fill(batch, divmod(i, shape[1]), row, sequences)
    return batch


def scatter(batch: Batch, values: np.ndarray, sequences: Sequence[TrainingSequence]) -> list:
    """Bring per-target values [K,R,M] back to per-token arrays, NaN where nothing is trained."""
    out = [np.full(s.response_ids.size, np.nan, np.float32) for s in sequences]
    mask = np.asarray(batch.loss_mask)
    owners, offsets = np.asarray(batch.sequences)[mask], np.asarray(batch.offsets)[mask]
    for owner, offset, value in zip(owners, offsets, np.asarray(values)[mask], strict=True):
        out[owner][offset] = value
    return out


def _context_size(s: TrainingSequence) -> int:
    """Response tokens that something trainable is predicted from."""
    trainable = np.flatnonzero(s.loss_mask)
    return int(trainable[-1]) if trainable.size else 0


def _span(s: TrainingSequence) -> int:
    return s.prompt_ids.size + _context_size(s)


def _units(sequences: Sequence[TrainingSequence], length: int) -> Iterator[_Unit]:
    """Equal prompts together, equal contexts once; a new unit whenever a row would overflow."""
    units: dict[bytes, _Unit] = {}
    branches: dict[tuple[bytes, bytes], _Branch] = {}
    for i, s in enumerate(sequences):
        if not s.loss_mask.any():
            continue
        if s.prompt_ids.size == 0:
            raise ValueError(f"sequence {i} has no prompt: nothing predicts its first token")
        context = np.asarray(s.response_ids[: _context_size(s)], np.int32)
        prompt = np.asarray(s.prompt_ids, np.int32).tobytes()
        unit = units.get(prompt)
        branch = branches.get((prompt, context.tobytes()))
        if branch is None:
            if unit is None or unit.length + context.size > length:
                if unit is not None:
                    yield unit
                unit = units[prompt] = _Unit(prompt=s.prompt_ids)
                branches = {k: b for k, b in branches.items() if k[0] != prompt}
            branch = branches[prompt, context.tobytes()] = _Branch(context=context, sequences=[])
            unit.branches.append(branch)
        branch.sequences.append(i)
        unit.targets += s.trainable_tokens
    yield from units.values()


def _first_fit_decreasing(units: list[_Unit], length: int) -> list[list[_Unit]]:
    """Longest first, each into the first row with room; ties keep their order."""
    rows: list[list[_Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda u: -u.length):
        fits = next((i for i, free in enumerate(room) if free >= unit.length), None)
        if fits is None:
            fits = len(rows)
            rows.append([])
            room.append(length)
        rows[fits].append(unit)
        room[fits] -= unit.length
    return rows


def _row_length(sequences: Sequence[TrainingSequence], config: PackingConfig) -> int:
    """The power of two with the least work, judged by bounds that vary little between steps.

    Responses count as their limit (or the next power of two of the longest one, if that is less),
    not as what was sampled, so that a run settles on one row length.
    """
    if not sequences:
        return 16
    longest = _power_of_two(max(s.response_ids.size for s in sequences))
    prompts: dict[bytes, list[int]] = {}
    for s in sequences:
        key = np.asarray(s.prompt_ids, np.int32).tobytes()
        limit = max(_context_size(s), min(longest, s.max_new_tokens) - 1)
        prompts.setdefault(key, [s.prompt_ids.size]).append(limit)
    groups = list(prompts.values())
    shortest = _power_of_two(max(size[0] + max(size[1:]) for size in groups))
    largest = max(shortest, min(_power_of_two(sum(map(sum, groups))), config.micro_batch_tokens))
    candidates = [shortest << i for i in range((largest // shortest).bit_length())]

    def work(length: int) -> float:
        sizes = [size for group in groups for size in _cut(group, length)]
        rows = _first_fit_decreasing([_Unit(prompt=np.empty(size)) for size in sizes], length)
        return len(rows) * length * (1 + length / config.attention_tokens)

    return min(candidates, key=work)


def _cut(group: list[int], length: int) -> Iterator[int]:
    """Unit sizes of one group, given as prompt size and branch sizes."""
    size = prompt = group[0]
    for branch in group[1:]:
        if size + branch > length:
            yield size
            size = prompt
        size += branch
    yield size


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _bucket(n: int, least: int = 1) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that holds n."""
    whole = _power_of_two(max(n, least))
    return whole * 3 // 4 if whole >= 4 and n <= whole * 3 // 4 >= least else whole


def _empty(
    shape: tuple[int, int],
    length: int,
    targets: int,
    denominator: float,
    step: int,
    real: int,
    on_policy: bool,
) -> Batch:
    def per_token() -> np.ndarray:
        return np.zeros((*shape, length), np.int32)

    def per_target(dtype: type, value: float = 0) -> np.ndarray:
        return np.full((*shape, targets), value, dtype)

    return Batch(
        tokens=per_token(),
        positions=per_token(),
        segments=per_token(),
        prefixes=per_token(),
        sources=per_target(np.int32),
        targets=per_target(np.int32),
        loss_mask=per_target(bool),
        temperatures=per_target(np.float32, 1),
        raw_logprobs=per_target(np.float32),
        behaviour_logprobs=per_target(np.float32),
        old_logprobs=per_target(np.float32),
        advantages=per_target(np.float32),
        scales=per_target(np.float32),
        sequences=per_target(np.int32, -1),
        offsets=per_target(np.int32),
        denominator=np.float32(denominator),
        micro_batches=np.int32(real),
        step=np.int32(step),
        on_policy=np.bool_(on_policy),
    )


def _fill(
    batch: Batch, at: tuple[int, int], row: list[_Unit], sequences: Sequence[TrainingSequence]
) -> None:
    """Write one row: tokens of each unit, and the targets of everyone who branches there."""
    cursor = segment = target = 0
    for unit in row:
        segment += 1
        prompt_segment, prompt_size = segment, unit.prompt.size
        last = cursor + prompt_size - 1
        _write_tokens(batch, at, cursor, unit.prompt, 0, segment, 0)
        cursor += prompt_size
        for branch in unit.branches:
            segment += 1
            _write_tokens(batch, at, cursor, branch.context, prompt_size, segment, prompt_segment)
            for owner in branch.sequences:
                target = _write_targets(batch, at, target, owner, sequences[owner], last, cursor)
            cursor += branch.context.size


def _write_tokens(
    batch: Batch,
    at: tuple[int, int],
    start: int,
    ids: np.ndarray,
    position: int,
    segment: int,
    prefix: int,
) -> None:
    where = (*at, slice(start, start + ids.size))
    batch.tokens[where] = ids
    batch.positions[where] = np.arange(position, position + ids.size)
    batch.segments[where] = segment
    batch.prefixes[where] = prefix


def _write_targets(
    batch: Batch,
    at: tuple[int, int],
    start: int,
    owner: int,
    s: TrainingSequence,
    last: int,
    branch: int,
) -> int:
    """Token t of a response is predicted by its token t-1, the first by the prompt's last."""
    offsets = np.flatnonzero(s.loss_mask)
    where = (*at, slice(start, start + offsets.size))
    batch.sources[where] = np.where(offsets == 0, last, branch + offsets - 1)
    batch.targets[where] = s.response_ids[offsets]
    batch.loss_mask[where] = True
    batch.temperatures[where] = s.temperature
    batch.raw_logprobs[where] = s.raw_logprobs[offsets]
    batch.behaviour_logprobs[where] = s.behaviour_logprobs[offsets]
    batch.advantages[where] = s.advantage
    batch.scales[where] = s.scale
    batch.sequences[where] = owner
    batch.offsets[where] = offsets
    return start + offsets.size
