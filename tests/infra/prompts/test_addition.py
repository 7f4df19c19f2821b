from __future__ import annotations

import itertools

import pytest

from infra.contracts.ids import prompt_id
from infra.prompts.addition import all_problems, fresh_problems, problem
from infra.prompts.split import is_held_out


@pytest.mark.parametrize(
    ("style", "x", "y", "text", "answer"),
    [
        ("few_shot", 10, 0, "12+5=17\n54+9=63\n10+0=", "10"),
        ("few_shot", 99, 9, "12+5=17\n54+9=63\n99+9=", "108"),
        ("reversed", 3, 4, "03+04=", "7."),
        ("reversed", 12, 5, "12+05=", "71."),
        ("reversed", 99, 99, "99+99=", "891."),
        ("reversed", 5, 5, "05+05=", "01."),
    ],
)
def test_problem(style: str, x: int, y: int, text: str, answer: str) -> None:
    prompt = problem(style, x, y)
    assert [(m.role, m.content) for m in prompt.messages] == [("text", text)]
    assert prompt.answer == answer


@pytest.mark.parametrize(("style", "count"), [("few_shot", 900), ("reversed", 10_000)])
def test_all_problems_are_different(style: str, count: int) -> None:
    texts = [p.messages[0].content for p in all_problems(style)]
    assert len(texts) == len(set(texts)) == count


def test_fresh_problems_repeat_by_seed_and_step() -> None:
    assert fresh_problems(1, 2, 20) == fresh_problems(1, 2, 20)
    assert fresh_problems(1, 2, 20) != fresh_problems(1, 3, 20)
    assert fresh_problems(1, 2, 20) != fresh_problems(2, 2, 20)


def test_fresh_problems_avoid_the_held_out_share() -> None:
    drawn = itertools.chain.from_iterable(fresh_problems(0, step, 200, 0.3) for step in range(5))
    ids = [prompt_id(p.messages, p.source) for p in drawn]
    assert len(ids) == 1000 and not any(is_held_out(i, 0.3) for i in ids)
