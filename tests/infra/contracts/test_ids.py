"""Ids are content: golden values that may never change, and what they do and do not depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.contracts import ids
from infra.contracts.records import Message, Prompt
from tests.record_strategies import TEXT

MESSAGES = (Message(role="user", content="2 + 3 ="),)
PROMPT = Prompt(
    messages=MESSAGES, source="addition", answer="5", tests=("t",), metadata={"a": "1", "b": "2"}
)
RESPONSE = np.array([220, 20, 2], np.int32)

GOLDEN = [
    ("content", lambda: ids.content_id("kind", "a", b"b", 1)),
    ("prompt", lambda: ids.prompt_id(MESSAGES, "addition")),
    ("revision", lambda: ids.prompt_revision(PROMPT)),
    ("revision of a prompt without gold", lambda: ids.prompt_revision(
        Prompt(messages=MESSAGES, source="addition"))),
    ("group", lambda: ids.group_id("run", ids.prompt_id(MESSAGES, "addition"), 12)),
    ("rollout", lambda: ids.rollout_id("group", 3, RESPONSE, ((4, "w4"), (5, "w5")))),
    ("empty rollout", lambda: ids.rollout_id("group", 0, RESPONSE[:0], ())),
    ("group seed", lambda: ids.group_seed(0, "group")),
    ("sample seed", lambda: ids.sample_seed(ids.group_seed(0, "group"), 7)),
]  # fmt: skip


VALUES = {
    "content": "d51e375395fe6b15d795efd382c84b78",
    "prompt": "f6dc6fc2fedeff8e6ae8a7d5e4b95ebc",
    "revision": "6119c21a43df73991352df79ff0bde6d",
    "revision of a prompt without gold": "264371ceac9c3548e79b5289c2533965",
    "group": "5f62a7645b24e8ee9a41b5ad1f892cc0",
    "rollout": "db674413130794827b3bc469209830ca",
    "empty rollout": "02efc6740ca0e71469593ed99e3e9a1a",
    "group seed": 6145373317282685715,
    "sample seed": 1167831703,
}


@pytest.mark.parametrize(("name", "compute"), GOLDEN, ids=[name for name, _ in GOLDEN])
def test_ids_never_change(name: str, compute: object) -> None:
    assert compute() == VALUES[name]


MESSAGE_LISTS = st.lists(st.builds(Message, role=TEXT, content=TEXT), max_size=3).map(tuple)


@given(MESSAGE_LISTS, TEXT, MESSAGE_LISTS, TEXT)
def test_prompt_ids_are_equal_exactly_when_messages_and_source_are(
    a: tuple[Message, ...], source_a: str, b: tuple[Message, ...], source_b: str
) -> None:
    equal = (a, source_a) == (b, source_b)
    assert (ids.prompt_id(a, source_a) == ids.prompt_id(b, source_b)) == equal


@given(st.dictionaries(TEXT, TEXT, max_size=4), st.randoms())
def test_the_order_of_metadata_does_not_matter(metadata: dict[str, str], random: object) -> None:
    items = list(metadata.items())
    random.shuffle(items)
    one, two = (replace(PROMPT, metadata=m) for m in (metadata, dict(items)))
    assert ids.prompt_revision(one) == ids.prompt_revision(two)


@pytest.mark.parametrize(
    "change",
    [
        {"answer": "6"},
        {"answer": None},
        {"answer": ""},
        {"tests": ()},
        {"tests": ("t", "t")},
        {"metadata": {"a": "1", "b": "3"}},
        {"metadata": {"a": "1"}},
        {"tests": ("t", "a"), "metadata": {"1": "b", "2": ""}},
    ],
)
def test_correcting_a_gold_changes_the_revision_and_not_the_id(change: dict[str, object]) -> None:
    corrected = replace(PROMPT, **change)
    assert ids.prompt_revision(corrected) != ids.prompt_revision(PROMPT)
    assert ids.prompt_id(corrected.messages, corrected.source) == ids.prompt_id(
        MESSAGES, "addition"
    )


@given(st.lists(TEXT, max_size=3), st.lists(TEXT, max_size=3))
def test_fields_cannot_collide_by_joining(a: list[str], b: list[str]) -> None:
    assert (ids.content_id("k", *a) == ids.content_id("k", *b)) == (a == b)


def test_a_rollout_id_depends_on_slot_response_and_weights_alone() -> None:
    base = ids.rollout_id("g", 0, RESPONSE, ((1, "w"),))
    assert ids.rollout_id("g", 0, RESPONSE.astype(np.int64), ((2, "w"),)) == base
    assert ids.rollout_id("g", 0, np.stack([RESPONSE, RESPONSE], 1)[:, 0], ((1, "w"),)) == base
    others = [
        ids.rollout_id("h", 0, RESPONSE, ((1, "w"),)),
        ids.rollout_id("g", 1, RESPONSE, ((1, "w"),)),
        ids.rollout_id("g", 0, RESPONSE[:2], ((1, "w"),)),
        ids.rollout_id("g", 0, RESPONSE, ((1, "x"),)),
        ids.rollout_id("g", 0, RESPONSE, ((1, "w"), (2, "x"))),
    ]
    assert len({base, *others}) == 6


@given(st.integers(0, 2**31), TEXT, st.integers(0, 1000))
def test_seeds_fit_where_they_go(run_seed: int, group: str, sample: int) -> None:
    seed = ids.group_seed(run_seed, group)
    assert 0 <= seed < 2**63
    assert 0 <= ids.sample_seed(seed, sample) < 2**31
