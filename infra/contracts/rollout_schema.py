"""The columns of a rollout shard, schema version 1, and what version 2 adds.

Read as they are by pandas, DuckDB and BigQuery. A row is one rollout with its judgement; the fields
of its group are repeated in every row. A shard is of the lowest version that can hold it, so that
older programs read what they can know, and digests stay.
"""

from __future__ import annotations

import pyarrow as pa

from infra.contracts.errors import NewerSchema, SchemaMismatch

SHARD_VERSION = 2
"""The newest."""
VERSION_KEY = b"headrace.schema_version"
TIMING_COLUMNS = ("timings",)
"""Columns outside every digest."""

_TEXT, _WHOLE, _INT, _REAL, _FLAG = pa.string(), pa.int64(), pa.int32(), pa.float64(), pa.bool_()


def _structs(**fields: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct(list(fields.items())))


GROUP_COLUMNS: dict[str, pa.DataType] = {
    "run": _TEXT,
    "group_id": _TEXT,
    "admission_index": _WHOLE,
    "prompt_id": _TEXT,
    "prompt_revision": _TEXT,
    "prompt_messages": _structs(role=_TEXT, content=_TEXT),
    "prompt_source": _TEXT,
    "prompt_answer": _TEXT,
    "prompt_tests": pa.list_(_TEXT),
    "prompt_metadata": pa.map_(_TEXT, _TEXT),
    "attempt": _WHOLE,
    "min_version": _WHOLE,
    "decision": _TEXT,
    "reason": _TEXT,
    "error": _TEXT,
    "group_rollouts": _INT,
    "timings": pa.map_(_TEXT, _REAL),
}
ROLLOUT_COLUMNS: dict[str, pa.DataType] = {
    "rollout_id": _TEXT,
    "sample_index": _WHOLE,
    "sequence_index": _WHOLE,
    "seed": _WHOLE,
    "prompt_ids": pa.list_(pa.int32()),
    "response_ids": pa.list_(pa.int32()),
    "response_text": _TEXT,
    "loss_mask": pa.list_(_FLAG),
    "behaviour_logprobs": pa.list_(pa.float32()),
    "raw_logprobs": pa.list_(pa.float32()),
    "policy_versions": pa.list_(pa.int32()),
    "weights": _structs(version=_WHOLE, digest=_TEXT),
    "spans": _structs(start=_WHOLE, end=_WHOLE, role=_TEXT, finish_reason=_TEXT),
    "token_columns": _structs(name=_TEXT, dtype=_TEXT, values=pa.list_(_REAL)),
    "finish_reason": _TEXT,
    "sampling_n": _INT,
    "sampling_max_new_tokens": _INT,
    "sampling_temperature": _REAL,
    "sampling_top_p": _REAL,
    "sampling_top_k": _INT,
    "sampling_stop": pa.list_(_TEXT),
    "engine": _TEXT,
    "engine_dtype": _TEXT,
    "tokenizer_digest": _TEXT,
}
JUDGEMENT_COLUMNS: dict[str, pa.DataType] = {
    "scores": _structs(
        scorer=_TEXT,
        settings_digest=_TEXT,
        verdict=_TEXT,
        value=_REAL,
        components=pa.map_(_TEXT, _REAL),
        explanation=_TEXT,
    ),
    "reward": _REAL,
    "task_reward": _REAL,
    "trainable": _FLAG,
    "weight": _REAL,
    "recipe_digest": _TEXT,
}
OPTIONS_COLUMN = "sampling_options"
"""Version 2, text: those sampling options that have no column and are not at their default, as a
JSON object (DuckDB: ``sampling_options->>'min_p'``). A new option is no new version."""
SCHEMA = pa.schema(
    list({**GROUP_COLUMNS, **ROLLOUT_COLUMNS, **JUDGEMENT_COLUMNS}.items()),
    metadata={VERSION_KEY: b"1"},
)


def with_options(table: pa.Table, options: list[str]) -> pa.Table:
    """The table as version 2, with one text per row."""
    column = pa.array(options, _TEXT)
    return table.append_column(OPTIONS_COLUMN, column).replace_schema_metadata({VERSION_KEY: b"2"})


def check_schema(schema: pa.Schema) -> None:
    """Refuse a table that is not ours, or newer. Raises ``SchemaMismatch``, ``NewerSchema``."""
    version = (schema.metadata or {}).get(VERSION_KEY, b"")
    if not version.isdigit():
        raise SchemaMismatch(f"not a rollout shard: the metadata lacks {VERSION_KEY.decode()}")
    if int(version) > SHARD_VERSION:
        raise NewerSchema(
            f"written by schema version {int(version)}, this program reads up to {SHARD_VERSION}; "
            "use the newer program"
        )
    expected = SCHEMA if int(version) == 1 else SCHEMA.append(pa.field(OPTIONS_COLUMN, _TEXT))
    for field in expected:
        if field.name not in schema.names or schema.field(field.name).type != field.type:
            raise SchemaMismatch(f"column '{field.name}' is missing or is not {field.type}")
    if len(schema) != len(expected):
        extra = sorted(set(schema.names) - set(expected.names))
        raise SchemaMismatch(f"unknown column '{extra[0] if extra else 'twice'}'")
