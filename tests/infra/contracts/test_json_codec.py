"""The JSON codec: exact, canonical, strict, and clear about where a problem is."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.contracts import manifests, records
from infra.contracts.errors import NewerSchema, SchemaMismatch
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.manifests import ControlState, WeightManifest
from infra.contracts.records import GenerateReply, Group, GroupTask, Judgement, Sample
from tests.builders import make_group, make_judgement, make_rollout, make_task
from tests.record_strategies import arrays, values


def declared(module: ModuleType) -> list[type]:
    return [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
    ]


RECORDS = declared(records) + declared(manifests)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_record_round_trips(cls: type, data: st.DataObject) -> None:
    record = data.draw(values(cls))
    encoded = to_json(record)
    assert to_json(from_json(cls, encoded)) == encoded
    assert json.dumps(json.loads(encoded), sort_keys=True, separators=(",", ":"),
                      ensure_ascii=False).encode() == encoded  # fmt: skip
    if cls.__eq__ is not object.__eq__ and b'"dtype"' not in encoded:
        assert from_json(cls, encoded) == record


@settings(max_examples=100, deadline=None)
@given(arrays())
def test_arrays_keep_every_bit_type_and_shape(array: np.ndarray) -> None:
    sample = Sample(
        response_ids=array,
        response_text="",
        behaviour_logprobs=array,
        raw_logprobs=array,
        policy_versions=array,
        finish_reason=records.FinishReason.STOP,
    )
    back = from_json(Sample, to_json(sample)).response_ids
    little = array.astype(array.dtype.newbyteorder("<"))
    assert back.dtype == little.dtype and back.shape == array.shape
    assert back.tobytes() == little.tobytes()


def test_equal_records_give_equal_bytes() -> None:
    task = make_task()
    metadata = {"b": "2", "a": "1"}
    one = replace(task, prompt=replace(task.prompt, metadata=metadata))
    two = replace(task, prompt=replace(task.prompt, metadata=dict(sorted(metadata.items()))))
    assert to_json(one) == to_json(two)


def test_numpy_scalars_are_written_as_numbers() -> None:
    judgement = replace(make_judgement(make_rollout()), reward=np.float32(0.1))
    assert from_json(Judgement, to_json(judgement)).reward == float(np.float32(0.1))
    assert from_json(GroupTask, to_json(make_task(np.int64(3)))).admission_index == 3


def changed(record: object, **changes: object) -> bytes:
    """The record's JSON with fields set (``__`` goes deeper), or removed with ``...``."""
    tree = json.loads(to_json(record))
    for path, value in changes.items():
        *above, last = path.split("__")
        place = tree
        for step in above:
            place = place[int(step) if step.isdigit() else step]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return json.dumps(tree).encode()


GROUP, STATE = make_group(), ControlState(run="r", epoch=1)
ARRAY = {"data": "AAAAAA==", "dtype": "float32", "shape": [1]}


@pytest.mark.parametrize(
    ("cls", "data", "message"),
    [
        (Group, b"{", "Group: not valid JSON"),
        (Group, b"\xff", "Group: not valid JSON"),
        (Group, b"[1]", "Group: expected an object, got list"),
        (Group, b"[" * 100_000, "Group: not valid JSON"),
        (Group, changed(GROUP, colour="red"), "Group.colour: unknown field"),
        (Group, changed(GROUP, group_id=...), "Group.group_id: field is missing"),
        (Group, changed(GROUP, attempt="1"), "Group.attempt: expected a whole number, got str"),
        (Group, changed(GROUP, attempt=True), "Group.attempt: expected a whole number, got bool"),
        (Group, changed(GROUP, attempt=1.0), "Group.attempt: expected a whole number, got float"),
        (Group, changed(GROUP, decision="maybe"), "Group.decision: 'maybe' is not one of rollouts"),
        (Group, changed(GROUP, timings={"a": "x"}), "Group.timings['a']: expected a number"),
        (Group, changed(GROUP, timings={"a": float("nan")}), "NaN is not a JSON number"),
        (Group, to_json(GROUP).replace(b'"generate":0.5', b'"generate":1e999'), "not a finite"),
        (
            Group,
            changed(GROUP, judgements__1__scores__0__verdict="great"),
            "Group.judgements[1].scores[0].verdict: 'great'",
        ),
        (
            Group,
            changed(GROUP, rollouts__0__weights=[[1, "a", 2]]),
            "Group.rollouts[0].weights[0]: expected 2 items, got 3",
        ),
        (
            Group,
            changed(GROUP, rollouts__0__sampling__n=0),
            "Group.rollouts[0].sampling: n = 0; at least 1",
        ),
        (Sample, changed(GROUP), "unknown field"),
    ]
    + [
        (
            Group,
            changed(GROUP, rollouts__0__raw_logprobs={**ARRAY, **change}),
            f"Group.rollouts[0].raw_logprobs: {message}",
        )
        for change, message in [
            ({"dtype": "object"}, "unknown array type 'object'"),
            ({"dtype": ["int32"]}, "unknown array type"),
            ({"shape": [2]}, "array of shape [2] and type float32 cannot have 4 bytes"),
            ({"shape": [-1]}, "[-1] is not an array shape"),
            ({"shape": 1}, "1 is not an array shape"),
            ({"data": "AAA"}, "array data is not base64"),
            ({"data": 3}, "array data is not base64"),
            ({"more": 3}, "expected an array as an object with data, dtype and shape"),
        ]
    ],
)
def test_what_is_wrong_is_refused_with_its_path(cls: type, data: bytes, message: str) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        from_json(cls, data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (replace(GROUP, timings={"a": float("nan")}), "Group.timings['a']: nan is not a finite"),
        (replace(GROUP, timings={"a": float("inf")}), "Group.timings['a']: inf is not a finite"),
        (replace(GROUP, rollouts=[]), "Group.rollouts: expected a tuple, got list"),
        (replace(GROUP, decision="rollouts"), "Group.decision: expected Decision, got str"),
        (replace(GROUP, attempt="1"), "Group.attempt: expected a whole number, got str"),
        (replace(GROUP, error="\ud800"), "Group: text is not valid Unicode"),
        (replace(GROUP, prompt=None), "Group.prompt: expected Prompt, got NoneType"),
        (
            replace(GROUP, rollouts=(replace(GROUP.rollouts[0], raw_logprobs=np.array(["a"])),)),
            "Group.rollouts[0].raw_logprobs: arrays of <U1 cannot be stored",
        ),
    ],
)
def test_wrong_records_are_not_encoded(record: object, message: str) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        to_json(record)
    assert message in str(caught.value)


def test_a_newer_schema_is_refused_even_if_it_has_unknown_fields() -> None:
    with pytest.raises(NewerSchema, match="schema version 2, this program reads up to 1"):
        from_json(ControlState, changed(STATE, schema_version=2, news="?"))


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.5])
def test_a_senseless_schema_version_is_refused(version: object) -> None:
    with pytest.raises(SchemaMismatch, match="schema_version"):
        from_json(ControlState, changed(STATE, schema_version=version))


def test_fields_that_a_later_version_added_take_their_defaults_in_old_records() -> None:
    assert from_json(ControlState, changed(STATE, stop_reason=..., flights=...)) == STATE


def test_free_form_configuration_survives_and_tuples_become_lists() -> None:
    manifest = WeightManifest(
        run="r",
        version=1,
        digest="d",
        parts=(),
        tensors=(),
        parent="",
        optimizer_step=1,
        model_config={"layers": 2, "rope": {"base": 1e4}, "stop": None, "shape": (1, np.int32(2))},
        tokenizer_digest="t",
        incarnation="i",
        created_at=0.0,
    )
    assert from_json(WeightManifest, to_json(manifest)).model_config == {
        "layers": 2,
        "rope": {"base": 1e4},
        "stop": None,
        "shape": [1, 2],
    }


def test_replies_keep_numbers_of_all_sizes() -> None:
    reply = GenerateReply(
        request_id="r",
        prompt_ids=np.array([2**31 - 1], np.int32),
        samples=(),
        weights=((sys.maxsize, "d"),),
        engine="e",
        dtype="float32",
        tokenizer_digest="t",
    )
    assert from_json(GenerateReply, to_json(reply)).weights == ((sys.maxsize, "d"),)
