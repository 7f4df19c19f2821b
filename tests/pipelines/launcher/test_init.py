from __future__ import annotations

import json

import pytest

from infra.config import read_toml
from infra.contracts.errors import HeadraceError
from pipelines.launcher.init import main
from pipelines.launcher.inspect_prompts import inspect_prompts
from pipelines.launcher.role_commands import RoleCommands
from pipelines.launcher.run_plan import plan_run


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "question", "answer", "after"),
    [
        ({"question": "q", "answer": "so 2 #### 4"}, "question", "answer", "#### "),
        ({"id": 1, "Problem": "q", "solution": "4"}, "Problem", "solution", ""),
        ({"messages": [{"role": "user", "content": "q"}]}, "messages", "", ""),
        ({"prompt": "q", "label": 3, "text": "x"}, "prompt", "label", ""),
    ],
)
def test_columns_are_guessed(tmp_path, row, question, answer, after):
    found = inspect_prompts(write_rows(tmp_path / "p.jsonl", [row, row]))
    assert (found.question, found.answer, found.answer_after) == (question, answer, after)
    assert found.rows == 2


@pytest.mark.parametrize(
    ("rows", "arguments", "words"),
    [
        (None, [], "no such file"),
        ([], [], "it is empty"),
        ([["a"]], [], "must be a JSON object"),
        ([{"x": "q"}], [], "no column looks like the question; columns: x; name one"),
        ([{"question": "q"}], [], "no column looks like the reference answer"),
        ([{"question": "q"}, {"question": "r", "answer": "1"}], [], "no column looks like the ref"),
        ([{"question": "q", "answer": "1"}], ["--scorer", "gone.py:f"], "no such file or module"),
        ([{"question": "q", "answer": "1"}], ["--scorer", "exact"], "exact_answer"),
        ([{"question": "q", "answer": "1"}] * 30, ["--model", "gpt"], "smollm2-135m"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, rows, arguments, words):
    monkeypatch.chdir(tmp_path)
    if rows is not None:
        write_rows(tmp_path / "p.jsonl", rows)
    with pytest.raises(HeadraceError) as refused:
        main(["--prompts", "p.jsonl", "--out", "out.toml", *arguments])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out.toml").exists()


def test_what_is_written_can_be_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("def score(text, answer, metadata):\n    return True\n")
    write_rows(tmp_path / "my.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(50)])
    assert main(["--prompts", "my.jsonl", "--scorer", "my.py:score", "--model", "tiny"]) == 0
    assert "headrace run my.toml --dry-run" in capsys.readouterr().out
    assert read_toml("my.toml")["recipe"]["scorers"] == ["my.py:score"]
    plan = plan_run("my.toml", None, [], RoleCommands())
    assert plan.train_prompts + plan.held_out_prompts == 50
    assert "location   runs/my" in plan.describe()
    with pytest.raises(HeadraceError, match="it exists"):
        main(["--prompts", "my.jsonl"])
