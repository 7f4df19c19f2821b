"""The rollout codec: exact, whole groups only, readable by anything that reads Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.contracts.errors import NewerSchema, SchemaMismatch
from infra.contracts.json_codec import to_json
from infra.contracts.records import Decision, Group
from infra.contracts.rollout_codec import content_digest, decode_groups, encode_groups
from infra.contracts.rollout_schema import SCHEMA, VERSION_KEY
from tests.builders import make_group, make_judgement, make_rollout
from tests.record_strategies import groups


def through_parquet(table: pa.Table, **options: object) -> pa.Table:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", **options)
    return pq.read_table(pa.BufferReader(sink.getvalue()))


def same(left: tuple[Group, ...], right: tuple[Group, ...]) -> bool:
    return list(map(to_json, left)) == list(map(to_json, right))


@settings(max_examples=30, deadline=None)
@given(st.lists(groups(finite=True), max_size=3, unique_by=lambda g: g.group_id).map(tuple))
def test_groups_round_trip_and_their_digest_is_of_the_content(records: tuple[Group, ...]) -> None:
    table = encode_groups(records)
    stored = through_parquet(table, row_group_size=2) if table.num_rows else table
    assert same(decode_groups(table), records)
    assert same(decode_groups(stored), records)
    assert content_digest(stored) == content_digest(table)
    untimed = tuple(replace(group, timings={"other": 1.0}) for group in records)
    assert content_digest(encode_groups(untimed)) == content_digest(table)


def test_non_finite_log_probs_survive_bit_for_bit() -> None:
    group = make_group(n=1)
    odd = np.array([np.nan, -np.inf, -0.0], np.float32)
    rollout = replace(group.rollouts[0], raw_logprobs=odd)
    (back,) = decode_groups(encode_groups([replace(group, rollouts=(rollout,))]))
    assert back.rollouts[0].raw_logprobs.tobytes() == odd.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda g: replace(g, reason="x"),
        lambda g: replace(g, attempt=2),
        lambda g: replace(g, prompt=replace(g.prompt, answer=None)),
        lambda g: replace(g, prompt=replace(g.prompt, answer="")),
        lambda g: replace(g, prompt=replace(g.prompt, metadata={"a": ""})),
        lambda g: replace(g, judgements=g.judgements[:1]),
        lambda g: replace(g, judgements=(), rollouts=()),
        lambda g: replace(g, rollouts=g.rollouts[::-1]),
    ],
)
def test_every_change_of_content_changes_the_digest(change: Callable[[Group], Group]) -> None:
    group = make_group()
    digests = {
        content_digest(encode_groups([g]))
        for g in (group, change(group), replace(group, prompt=replace(group.prompt, answer="9")))
    }
    assert len(digests) == 3


def test_text_moved_between_neighbouring_cells_changes_the_digest() -> None:
    def with_texts(first: str, second: str) -> bytes:
        one, two = make_group().rollouts
        pair = (replace(one, response_text=first), replace(two, response_text=second))
        return content_digest(encode_groups([replace(make_group(), rollouts=pair)]))

    assert with_texts("ab", "c") != with_texts("a", "bc")


def test_judgements_join_by_id_not_by_position() -> None:
    group = make_group(n=3, rewards=[1.0, 0.0, 0.5])
    shuffled = replace(group, judgements=group.judgements[::-1])
    assert same(decode_groups(encode_groups([shuffled])), (group,))


def test_a_group_without_rollouts_is_one_row_with_a_null_id() -> None:
    table = encode_groups([make_group(3, decision=Decision.FAILED)])
    assert table.num_rows == 1
    assert table.column("rollout_id").to_pylist() == [None]
    assert table.column("error").to_pylist() == ["ConnectionError: no worker"]


def test_the_table_is_readable_as_it_is() -> None:
    row = through_parquet(encode_groups([make_group(7)])).to_pylist()[0]
    assert row["prompt_messages"] == [{"role": "user", "content": "7 + 1 ="}]
    assert row["response_ids"] == [701, 702, 703]
    assert row["behaviour_logprobs"] == [-0.25, -0.5, -0.75]
    assert row["loss_mask"] == [True, True, True]
    assert row["scores"][0]["verdict"] == "pass"
    assert row["scores"][0]["components"] == [("exact", 1.0)]
    assert row["reward"] == 1.0 and row["decision"] == "rollouts" and row["sampling_n"] == 2


def test_decoded_arrays_cannot_be_written_to() -> None:
    (group,) = decode_groups(encode_groups([make_group()]))
    rollout = group.rollouts[0]
    for array in (rollout.response_ids, rollout.loss_mask, rollout.behaviour_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


ONE, TWO = make_group().rollouts


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            replace(
                make_group(), prompt=replace(make_group().prompt, attachments=(("d", "t", "u"),))
            ),
            "Prompt.attachments is declared, not implemented",
        ),
        (
            replace(make_group(), rollouts=(make_rollout(1), TWO), judgements=()),
            "its group_id differs",
        ),
        (replace(make_group(), rollouts=(ONE, ONE)), "share an id"),
        (
            replace(make_group(), judgements=(make_judgement(ONE), make_judgement(ONE))),
            "share an id",
        ),
        (
            replace(make_group(), judgements=(make_judgement(make_rollout(5)),)),
            "judgement of unknown rollout",
        ),
        (
            replace(
                make_group(),
                rollouts=(replace(ONE, response_ids=ONE.response_ids.astype(np.int64)), TWO),
            ),
            r"column 'response_ids' .* expected int32\[T\], got int64\(3,\)",
        ),
        (
            replace(make_group(), rollouts=(replace(ONE, loss_mask=[True, True, True]), TWO)),
            r"column 'loss_mask' .* expected bool\[T\], got list",
        ),
        (
            replace(
                make_group(),
                rollouts=(replace(ONE, token_columns={"route": np.zeros(3, np.int64)}), TWO),
            ),
            r"token column 'route': int64\[3\] cannot be stored",
        ),
        (
            replace(make_group(), rollouts=(replace(ONE, seed=2**63), TWO)),
            "column 'seed' cannot be stored as int64",
        ),
        (
            replace(make_group(), rollouts=(replace(ONE, response_text="\ud800"), TWO)),
            "column 'response_text' cannot be stored as string",
        ),
    ],
)
def test_what_does_not_belong_is_refused_by_name(group: Group, message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        encode_groups([group])


def with_metadata(table: pa.Table, version: bytes | None) -> pa.Table:
    return table.replace_schema_metadata({VERSION_KEY: version} if version else None)


def test_newer_and_foreign_tables_are_refused() -> None:
    table = encode_groups([make_group()])
    with pytest.raises(NewerSchema, match="schema version 3, this program reads up to 2"):
        decode_groups(with_metadata(table, b"3").drop_columns(["reward"]))
    with pytest.raises(SchemaMismatch, match="not a rollout shard"):
        decode_groups(with_metadata(table, None))
    with pytest.raises(SchemaMismatch, match="column 'reward' is missing"):
        decode_groups(table.drop_columns(["reward"]))
    with pytest.raises(SchemaMismatch, match="unknown column 'extra'"):
        decode_groups(table.append_column("extra", pa.array([1, 2])))


@pytest.mark.parametrize("rows", [[0], [1], [0, 1, 2], [0, 2, 1, 3]])
def test_a_group_that_is_not_whole_is_refused(rows: list[int]) -> None:
    table = encode_groups([make_group(0), make_group(1)]).take(rows)
    with pytest.raises(SchemaMismatch, match="is not whole"):
        decode_groups(table)


def test_an_unknown_verdict_is_refused() -> None:
    table = encode_groups([make_group()])
    column = pa.array(["maybe", "maybe"])
    changed = table.set_column(table.column_names.index("decision"), "decision", column)
    with pytest.raises(SchemaMismatch, match="'maybe' is not a valid Decision"):
        decode_groups(changed)


def test_no_groups_make_an_empty_table_of_the_same_schema() -> None:
    assert encode_groups([]).schema == SCHEMA
    assert decode_groups(encode_groups([])) == ()
