"""Shared-prefix packing: a group's prompt stands once in a row and its responses branch from it.

    row   : [prompt A][resp A1][resp A2]...[prompt B][resp B1]...[padding]
    segment  1 1 1 1   2 2 2    3 3         4 4 4     5 5 5         0
    prefix   0 0 0 0   1 1 1    1 1         0 0 0     4 4 4         0

The model lets a token attend to its own segment and its prefix, so each response sees exactly its
prompt and itself, and the prompt is computed once instead of n times. What nothing is predicted
from (a response's last token) is not computed at all, and responses that are equal up to there
share one branch. A group that fits no row is cut into several units that repeat the prompt.

The shapes are a pure function of the step's data, in coarse buckets: compiling takes tens of
seconds, so a run should do it once or twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainer.batch import Batch
from trainer.credit import TrainingSequence
from trainer.row_plan import (
    Branch,
    PackingConfig,
    Unit,
    bucket,
    choose_length,
    context_size,
    first_fit_decreasing,
    most_targets,
    settled,
)


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
    length = choose_length(sequences, config)
    rows = first_fit_decreasing(list(_units(sequences, length)), length)
    per_micro = max(1, config.micro_batch_tokens // length)
    if len(rows) <= per_micro:
        real, shape = 1, (1, min(bucket(len(rows)), per_micro))
    else:
        real = -(-len(rows) // per_micro)
        shape = (bucket(real), per_micro)
    micros = [rows[i : i + shape[1]] for i in range(0, len(rows), shape[1])]
    most = max((sum(u.targets for row in micro for u in row) for micro in micros), default=1)
    targets = settled(most, -(-most_targets(sequences) // shape[0]), least=16)
    batch = _empty(shape, length, targets, denominator, step, real, on_policy)
    for k, micro in enumerate(micros):
        target = 0
        for r, row in enumerate(micro):
            target = _fill(batch, (k, r), row, sequences, target)
        batch.owners[k] = np.unique(batch.sequences[k], return_inverse=True)[1]
    return batch


def scatter(batch: Batch, values: np.ndarray, sequences: Sequence[TrainingSequence]) -> list:
    """Bring per-target values [K,M] back to per-token arrays, NaN where nothing is trained."""
    out = [np.full(s.response_ids.size, np.nan, np.float32) for s in sequences]
    mask = np.asarray(batch.loss_mask)
    owners, offsets = np.asarray(batch.sequences)[mask], np.asarray(batch.offsets)[mask]
    for owner, offset, value in zip(owners, offsets, np.asarray(values)[mask], strict=True):
        out[owner][offset] = value
    return out


def gather(batch: Batch, values: Sequence[np.ndarray]) -> np.ndarray:
    """The opposite of ``scatter``: per-token arrays as float32[K,M], 0 in padding."""
    out = np.zeros(np.shape(batch.loss_mask), np.float32)
    mask = np.asarray(batch.loss_mask)
    owners, offsets = np.asarray(batch.sequences)[mask], np.asarray(batch.offsets)[mask]
    out[mask] = [values[i][t] for i, t in zip(owners, offsets, strict=True)]
    return out


def _units(sequences: Sequence[TrainingSequence], length: int) -> Iterator[Unit]:
    """Equal prompts together, equal contexts once; a new unit whenever a row would overflow."""
    units: dict[bytes, Unit] = {}
    branches: dict[tuple[bytes, bytes], Branch] = {}
    for i, s in enumerate(sequences):
        if not s.loss_mask.any():
            continue
        if s.prompt_ids.size == 0:
            raise ValueError(f"sequence {i} has no prompt: nothing predicts its first token")
        context = np.asarray(s.response_ids[: context_size(s)], np.int32)
        prompt = np.asarray(s.prompt_ids, np.int32).tobytes()
        unit = units.get(prompt)
        branch = branches.get((prompt, context.tobytes()))
        if branch is None:
            if unit is None or unit.length + context.size > length:
                if unit is not None:
                    yield unit
                unit = units[prompt] = Unit(prompt=s.prompt_ids)
                branches = {k: b for k, b in branches.items() if k[0] != prompt}
            branch = branches[prompt, context.tobytes()] = Branch(context=context, sequences=[])
            unit.branches.append(branch)
        branch.sequences.append(i)
        unit.targets += s.trainable_tokens
    yield from units.values()


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
        return np.full((shape[0], targets), value, dtype)

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
        reference_logprobs=per_target(np.float32),
        advantages=per_target(np.float32),
        scales=per_target(np.float32),
        sequences=per_target(np.int32, -1),
        owners=per_target(np.int32),
        offsets=per_target(np.int32),
        denominator=np.float32(denominator),
        micro_batches=np.int32(real),
        step=np.int32(step),
        on_policy=np.bool_(on_policy),
    )


def _fill(
    batch: Batch,
    at: tuple[int, int],
    row: list[Unit],
    sequences: Sequence[TrainingSequence],
    target: int,
) -> int:
    """Write one row: tokens of each unit, and the targets of everyone who branches there.

    Returns the first free target; ``target`` is that before this row.
    """
    cursor = segment = 0
    before = at[1] * batch.tokens.shape[2]
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
                target = _write_targets(
                    batch, at[0], target, owner, sequences[owner], before + last, before + cursor
                )
            cursor += branch.context.size
    return target


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
    micro: int,
    start: int,
    owner: int,
    s: TrainingSequence,
    last: int,
    branch: int,
) -> int:
    """Token t of a response is predicted by its token t-1, the first by the prompt's last."""
    offsets = np.flatnonzero(s.loss_mask)
    where = (micro, slice(start, start + offsets.size))
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
