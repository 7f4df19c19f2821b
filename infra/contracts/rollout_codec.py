"""Groups as an Arrow table: one row per rollout, the group's fields repeated in every row.

The table is what a shard's Parquet file holds and is meant to be read as it is (pandas, DuckDB,
BigQuery): flat names, one list per token column, scores as a list of structs. A group without any
rollout (a failed one) is one row whose ``rollout_id`` is null. Example row::

    group_id=9f.. admission_index=12 prompt_answer='42' decision='rollouts' group_rollouts=8
    rollout_id=1c.. sample_index=0 response_ids=[220, 19, 17, 2] response_text=' 42'
    behaviour_logprobs=[-0.1, -0.02, ...] scores=[{scorer: 'exact_answer@1', verdict: 'pass', ..}]
    reward=1.0 ...

Judgements are joined to rollouts by id and come back in the rollouts' order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from infra.contracts.arrow_columns import build_column, column_bytes, read_column
from infra.contracts.errors import SchemaMismatch
from infra.contracts.judgement_rows import judgement_of_row, judgement_row
from infra.contracts.records import (
    Decision,
    FinishReason,
    Group,
    Judgement,
    Message,
    Prompt,
    Rollout,
    SamplingParams,
)
from infra.contracts.rollout_schema import (
    GROUP_COLUMNS,
    JUDGEMENT_COLUMNS,
    OPTIONS_COLUMN,
    ROLLOUT_COLUMNS,
    SCHEMA,
    TIMING_COLUMNS,
    check_schema,
    with_options,
)
from infra.contracts.sampling_options import SAMPLING_COLUMNS, options_text, sampling_of

# Held exactly by the float64 list that every token column is stored in.
_TOKEN_COLUMN_DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "float32", "float64"),
)
_SHARED = ("run", "group_id", "admission_index", "prompt_id", "prompt_revision")


def encode_groups(groups: Iterable[Group]) -> pa.Table:
    """Encode whole groups, in order.

    Raises:
        SchemaMismatch: a value does not fit its column, a rollout or judgement does not belong to
            its group, or something is used that is declared and not implemented.
    """
    groups = tuple(groups)
    rows: list[tuple[Rollout | None, Judgement | None]] = []
    for group in groups:
        rows += _rows_of_group(group)
    group_of_row = np.repeat(np.arange(len(groups)), [max(len(g.rollouts), 1) for g in groups])
    columns = [
        build_column(name, values, GROUP_COLUMNS[name]).take(pa.array(group_of_row))
        for name, values in _transposed(map(_group_row, groups), GROUP_COLUMNS)
    ]
    for kinds, cells in (
        (ROLLOUT_COLUMNS, (_rollout_row(rollout) for rollout, _ in rows)),
        (JUDGEMENT_COLUMNS, (judgement_row(judgement) for _, judgement in rows)),
    ):
        columns += [build_column(name, v, kinds[name]) for name, v in _transposed(cells, kinds)]
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    options = ["{}" if rollout is None else options_text(rollout.sampling) for rollout, _ in rows]
    return table if set(options) <= {"{}"} else with_options(table, options)


def decode_groups(table: pa.Table) -> tuple[Group, ...]:
    """Decode what ``encode_groups`` made. Arrays are read-only views of the table.

    Raises:
        NewerSchema: written by a newer program.
        SchemaMismatch: not such a table, a group is not whole, or a value is not allowed.
    """
    check_schema(table.schema)
    sizes = table.column("group_rollouts").to_pylist()
    first_rows, row = [], 0
    while row < table.num_rows:
        first_rows.append(row)
        row += max(sizes[row] or 0, 1)
    ids = table.column("group_id").to_pylist()
    ranges = list(pairwise([*first_rows, table.num_rows]))
    for first, end in ranges:
        if row != table.num_rows or ids[first:end] != [ids[first]] * (end - first):
            raise SchemaMismatch(f"group {ids[first]} is not whole: it has {sizes[first]} rollouts")
    heads = _cells(table.select(list(GROUP_COLUMNS)).take(pa.array(first_rows, pa.int64())))
    bodies = _cells(table.select(list(ROLLOUT_COLUMNS)))
    if OPTIONS_COLUMN in table.column_names:
        options = table.column(OPTIONS_COLUMN).to_pylist()
    else:
        options = ["{}"] * table.num_rows
    bodies = [(*body, text) for body, text in zip(bodies, options, strict=True)]
    verdicts = _cells(table.select(list(JUDGEMENT_COLUMNS)))
    try:
        return tuple(
            _group(head, bodies[first:end], verdicts[first:end])
            for head, (first, end) in zip(heads, ranges, strict=True)
        )
    except (ValueError, TypeError) as e:
        raise SchemaMismatch(f"a row of the shard holds a value that is not allowed: {e}") from e


def content_digest(table: pa.Table) -> bytes:
    """SHA-256 of the content without timings, independent of file format, layout and library."""
    digest = hashlib.sha256()
    for name in table.column_names:
        if name not in TIMING_COLUMNS:
            digest.update(name.encode())
            for part in column_bytes(table.column(name).combine_chunks()):
                digest.update(part)
    return digest.digest()


def _transposed(
    rows: Iterable[Sequence[Any]], kinds: dict[str, pa.DataType]
) -> Iterator[tuple[str, Sequence[Any]]]:
    columns = list(zip(*rows, strict=True)) or [()] * len(kinds)
    return zip(kinds, columns, strict=True)


def _cells(table: pa.Table) -> list[tuple[Any, ...]]:
    columns = (read_column(column.combine_chunks()) for column in table.columns)
    return list(zip(*columns, strict=True))


def _rows_of_group(group: Group) -> list[tuple[Rollout | None, Judgement | None]]:
    if group.prompt.attachments:
        raise SchemaMismatch(
            f"group {group.group_id}: Prompt.attachments is declared, not implemented; "
            "leave it empty"
        )
    for rollout in group.rollouts:
        for name in _SHARED:
            if getattr(rollout, name) != getattr(group, name):
                raise SchemaMismatch(
                    f"rollout {rollout.rollout_id}: its {name} differs from that of its group "
                    f"{group.group_id}"
                )
    judgements = {judgement.rollout_id: judgement for judgement in group.judgements}
    ids = {rollout.rollout_id for rollout in group.rollouts}
    if len(ids) != len(group.rollouts) or len(judgements) != len(group.judgements):
        raise SchemaMismatch(f"group {group.group_id}: two rollouts or judgements share an id")
    if not judgements.keys() <= ids:
        stray = min(judgements.keys() - ids)
        raise SchemaMismatch(f"group {group.group_id}: judgement of unknown rollout {stray}")
    return [(r, judgements.get(r.rollout_id)) for r in group.rollouts] or [(None, None)]


def _group_row(group: Group) -> tuple[Any, ...]:
    prompt = group.prompt
    return (
        group.run,
        group.group_id,
        group.admission_index,
        group.prompt_id,
        group.prompt_revision,
        [(message.role, message.content) for message in prompt.messages],
        prompt.source,
        prompt.answer,
        prompt.tests,
        prompt.metadata,
        group.attempt,
        group.min_version,
        None if group.decision is None else group.decision.value,
        group.reason,
        group.error,
        len(group.rollouts),
        group.timings,
    )


def _group(
    head: tuple[Any, ...], bodies: list[tuple[Any, ...]], verdicts: list[tuple[Any, ...]]
) -> Group:
    shared = head[:5]
    messages, source, answer, tests, metadata = head[5:10]
    attempt, min_version, decision, reason, error, size, timings = head[10:]
    ids = [body[0] for body in bodies] if size else []
    return Group(
        **dict(zip(_SHARED, shared, strict=True)),
        prompt=Prompt(
            messages=tuple(Message(role=role, content=content) for role, content in messages),
            source=source,
            answer=answer,
            tests=tests,
            metadata=metadata,
        ),
        attempt=attempt,
        min_version=min_version,
        rollouts=tuple(_rollout(shared, body) for body in bodies) if size else (),
        judgements=tuple(
            judgement_of_row(rollout, verdict)
            for rollout, verdict in zip(ids, verdicts, strict=False)
            if verdict[0] is not None
        ),
        decision=None if decision is None else Decision(decision),
        reason=reason,
        error=error,
        timings=timings,
    )


def _rollout_row(rollout: Rollout | None) -> tuple[Any, ...]:
    if rollout is None:
        return (None,) * len(ROLLOUT_COLUMNS)
    sampling = rollout.sampling
    return (
        rollout.rollout_id,
        rollout.sample_index,
        rollout.sequence_index,
        rollout.seed,
        rollout.prompt_ids,
        rollout.response_ids,
        rollout.response_text,
        rollout.loss_mask,
        rollout.behaviour_logprobs,
        rollout.raw_logprobs,
        rollout.policy_versions,
        rollout.weights,
        rollout.spans,
        [
            _token_column(name, rollout.token_columns[name])
            for name in sorted(rollout.token_columns)
        ],
        rollout.finish_reason.value,
        *(getattr(sampling, name) for name in SAMPLING_COLUMNS),
        rollout.engine,
        rollout.engine_dtype,
        rollout.tokenizer_digest,
    )


def _rollout(shared: tuple[Any, ...], body: tuple[Any, ...]) -> Rollout:
    rollout_id, sample_index, sequence_index, seed, prompt_ids, response_ids, text = body[:7]
    mask, behaviour, raw, versions, weights, spans, token_columns, finish_reason = body[7:15]
    *sampling, engine, dtype, tokenizer, options = body[15:]
    return Rollout(
        **dict(zip(_SHARED, shared, strict=True)),
        rollout_id=rollout_id,
        sample_index=sample_index,
        sequence_index=sequence_index,
        seed=seed,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_text=text,
        loss_mask=mask,
        behaviour_logprobs=behaviour,
        raw_logprobs=raw,
        policy_versions=versions,
        weights=weights,
        spans=spans,
        token_columns={name: values.astype(kind) for name, kind, values in token_columns},
        finish_reason=FinishReason(finish_reason),
        sampling=_sampling(options, *sampling),
        engine=engine,
        engine_dtype=dtype,
        tokenizer_digest=tokenizer,
    )


@functools.lru_cache(maxsize=64)  # a shard's rollouts share theirs
def _sampling(options: str, *columns: Any) -> SamplingParams:
    return sampling_of(dict(zip(SAMPLING_COLUMNS, columns, strict=True)), options)


def _token_column(name: str, values: np.ndarray) -> tuple[str, str, np.ndarray]:
    if values.ndim != 1 or values.dtype.name not in _TOKEN_COLUMN_DTYPES:
        raise SchemaMismatch(
            f"token column '{name}': {values.dtype}{list(values.shape)} cannot be stored; "
            f"give one of {', '.join(_TOKEN_COLUMN_DTYPES)} of shape [T]"
        )
    return name, values.dtype.name, values.astype(np.float64)
