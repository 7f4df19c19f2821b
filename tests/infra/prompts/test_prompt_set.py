"""Loading and splitting, and one clear line for everything a prompt file can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.contracts.errors import ConfigError
from infra.contracts.ids import prompt_id
from infra.contracts.records import Message
from infra.prompts.prompt_set import load_prompt_set
from infra.prompts.split import is_held_out
from infra.run_config import PromptsConfig


def write(folder: Path, *rows: object) -> str:
    path = folder / "questions.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def load(path: str, **settings: object):
    return load_prompt_set(PromptsConfig(path=path, **{"held_out": 0.0, **settings}))


def test_rows_become_prompts(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"question": "2 {+} 3?", "answer": "It is 5 #### 5", "level": 1, "tags": ["a"], "by": "me"},
        "",
        {"question": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}],
         "answer": "#### 7"},
    )  # fmt: skip
    found = load(path, template="Q: {question}\nA:", answer_after="####")
    first, second = found.train
    assert found.name == first.source == "questions"
    assert first.messages == (Message(role="user", content="Q: 2 {+} 3?\nA:"),)
    assert (first.answer, second.answer) == ("5", "7")
    assert first.metadata == {"level": "1", "tags": '["a"]', "by": "me"}
    assert [m.role for m in second.messages] == ["system", "user"]
    assert found.train_ids[0] == prompt_id(first.messages, "questions")


def test_role_text_limit_numbers_and_no_answers(tmp_path: Path) -> None:
    path = write(tmp_path, *({"q": f"{i}", "a": i} for i in range(5)))
    found = load(path, question="q", answer="a", role="text", limit=3)
    assert [p.answer for p in found.train] == ["0", "1", "2"]
    assert found.train[0].messages[0].role == "text"
    assert [p.answer for p in load(path, question="q", answer="").train] == [None] * 5


def test_duplicates_are_kept_once_and_counted(tmp_path: Path) -> None:
    rows = [{"question": q, "answer": "1"} for q in ("a", "b", "a", "a")]
    found = load(write(tmp_path, *rows))
    assert [p.messages[0].content for p in found.train] == ["a", "b"] and found.duplicates == 2


def test_a_corrected_answer_keeps_the_digest_a_new_prompt_does_not(tmp_path: Path) -> None:
    digests = [
        load(write(tmp_path, *({"question": q, "answer": a} for q, a in rows))).digest
        for rows in ([("a", "1")], [("a", "2")], [("a", "1"), ("b", "1")])
    ]
    assert digests[0] == digests[1] != digests[2]


GOOD = {"question": "a", "answer": "1"}
BROKEN = {
    "empty file": ([""], {}, "is empty"),
    "not JSON": ([GOOD, "{'question': 1}"], {}, r"questions\.jsonl:2: not JSON"),
    "not an object": ([GOOD, "", "[1]"], {}, r":3: list; each line must be a JSON object"),
    "missing column": ([{"q": "a", "answer": "1"}], {}, r":1: no column 'question'; present: q,"),
    "missing answer": ([{"question": "a"}], {}, r":1: no column 'answer'; present: question"),
    "null answer": ([{"question": "a", "answer": None}], {}, r":1: column 'answer' holds null"),
    "empty answer": ([{"question": "a", "answer": " "}], {}, r":1: column 'answer' is empty"),
    "no mark": ([GOOD], {"answer_after": "####"}, r":1: no '####' \(answer_after\)"),
    "empty question": ([{"question": " ", "answer": "1"}], {}, r":1: column 'question' must be"),
    "strange message": ([{"question": [{"role": "robot", "content": "a"}], "answer": "1"}], {},
                        r'"role": "robot"'),
    "text is not alone": ([{"question": [{"role": "text", "content": "a"}] * 2, "answer": "1"}], {},
                          "must stand alone"),
    "half a character": (['{"question": "\\ud800", "answer": "1"}'], {}, "surrogate"),
    "template": ([GOOD], {"template": "Q:"}, r"lacks \{question\}"),
    "all held out": ([GOOD], {"held_out": 0.999999}, "all 1 prompts are held out"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file(name: str, tmp_path: Path) -> None:
    rows, settings, message = BROKEN[name]
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path, *rows), **settings)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: no such file"):
        load(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(str(tmp_path / "b.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path))


def test_the_demo_split() -> None:
    """The demo evaluates 96 held-out problems: the split must offer them, and stay as it is."""
    found = load_prompt_set(PromptsConfig(source="addition", style="few_shot", role="text"))
    assert len(found.train) + len(found.held_out) == 900
    assert len(found.held_out) == HELD_OUT
    assert not found.held_out_ids & set(found.train_ids)


HELD_OUT = 183


@given(st.lists(st.text(), min_size=1, unique=True), st.floats(0, 1), st.floats(0, 1))
def test_the_split_grows_with_the_share(ids: list[str], one: float, other: float) -> None:
    small, large = sorted((one, other))
    for name in ids:
        assert is_held_out(name, small) <= is_held_out(name, large)
        assert is_held_out(name, 1.0) and not is_held_out(name, 0.0)
