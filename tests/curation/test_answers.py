import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.text.answers import METHODS, extract

CASES = [
    ("first_line", " 45\n\nQ: 1 + 1\nA: 2", "45"),
    ("first_line", "\n45", "45"),
    ("last_line", "so\nit is\n 7 \n\n", "7"),
    ("whole", "  a b ", "a b"),
    ("boxed", r"x \boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    ("boxed", r"\boxed{a\}b}", r"a\}b"),
    ("answer_line", "Answer: 3\nThe final answer is: **4**", "4"),
    ("answer_line", "work\n#### 1,234", "1,234"),
    ("answer_line", "A: 12\nQ: next", "12"),
    ("answer_line", "**Answer:**\n\n 9", "9"),
    ("last_number", "from 3 to -1,234.50, right", "-1,234.50"),
    ("last_number", "x = 5-3", "3"),
    ("last_number", "it is 3/4.", "3/4"),
]
NOTHING = [
    ("first_line", " \n "),
    ("boxed", r"\boxed{1"),
    ("boxed", "1"),
    ("answer_line", "the answer may be 4"),
    ("last_number", "none"),
    ("whole", ""),
]


@pytest.mark.parametrize(("method", "text", "expected"), CASES)
def test_extraction(method, text, expected):
    assert extract(text, [method]) == (expected, method)


@pytest.mark.parametrize(("method", "text"), NOTHING)
def test_nothing_found(method, text):
    assert extract(text, [method]) == ("", "")


def test_thinking_is_not_an_answer():
    assert extract("<think>\\boxed{1}</think>\\boxed{2}", ["boxed"]).candidate == "2"
    assert extract("<think>\\boxed{1}</think>no", ["boxed"]).method == ""
    assert extract("<think>\\boxed{1}", ["boxed", "whole"]).method == ""
    assert extract("\\boxed{1}<think>", ["boxed"]).method == ""


def test_the_first_method_that_finds_something_decides():
    assert extract("\\boxed{1} or 2", ["boxed", "last_number"]) == ("1", "boxed")
    assert extract("1 or 2", ["boxed", "last_number"]) == ("2", "last_number")


@given(st.text(alphabet="{}\\boxedA:#0123,./-$ \n<think>", max_size=80))
def test_any_text_is_survived_and_candidates_stand_in_it(text):
    for method in METHODS:
        found = extract(text, [method])
        assert found.candidate in text
        assert bool(found.method) or found.candidate == ""
