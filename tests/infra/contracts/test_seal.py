"""The seal of a marker: still JSON, optional in old files, and no flipped bit passes it."""

from __future__ import annotations

import json

import pytest

from infra.contracts.errors import SchemaMismatch
from infra.contracts.json_codec import from_json, seal, to_json, to_marker, unseal
from infra.contracts.manifests import ControlState
from infra.contracts.records import Prompt
from tests.builders import make_prompt
from tests.golden_records import RECORDS

MARKERS = ["shard_manifest", "weight_manifest_delta", "ledger_entry", "control_state"]


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_is_json_and_reads_with_its_seal_and_without(name: str) -> None:
    record = RECORDS[name]
    data = to_marker(record)
    tree = json.loads(data)
    assert list(tree)[-1] == "seal" and tree.pop("seal").startswith("crc32c:")
    assert tree == json.loads(to_json(record))
    assert from_json(type(record), data) == from_json(type(record), to_json(record)) == record
    assert from_json(type(record), data.decode() + "\n") == record


@pytest.mark.parametrize("name", MARKERS)
def test_every_flipped_bit_is_detected(name: str) -> None:
    record, good = RECORDS[name], to_marker(RECORDS[name])
    for place in range(len(good) * 8):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        with pytest.raises(SchemaMismatch):
            from_json(type(record), bytes(data))


def test_what_to_do_is_said_with_the_name_of_the_object() -> None:
    data = to_marker(ControlState(run="test", epoch=3)).replace(b'"epoch":3', b'"epoch":4')
    with pytest.raises(SchemaMismatch, match=r'run/state: .*seal.*take the member "seal" out'):
        from_json(ControlState, data, name="run/state")
    tree = json.loads(data)
    del tree["seal"]
    assert from_json(ControlState, json.dumps(tree, indent=1)).epoch == 4


def test_text_that_looks_like_a_seal_is_text() -> None:
    prompt = make_prompt(answer=',"seal":"crc32c:00000000"}')
    assert from_json(Prompt, to_json(prompt)) == from_json(Prompt, to_marker(prompt)) == prompt


def test_any_json_object_can_be_sealed() -> None:
    assert unseal(seal(b'{"a": 1}')) == b'{"a": 1}' == unseal(b'{"a": 1}')
