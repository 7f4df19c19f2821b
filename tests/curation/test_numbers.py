from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.text.numbers import TooLarge, parse_number

CASES = [
    ("42", 42), (" 42. ", 42), ("-3/4", Fraction(-3, 4)), ("1,234.50", Fraction(2469, 2)),
    ("1{,}234", 1234), (r"\frac{1}{2}", Fraction(1, 2)), (r"-\dfrac{3}{6}", Fraction(-1, 2)),
    ("1 1/2", Fraction(3, 2)), ("50%", Fraction(1, 2)), (r"50\%", Fraction(1, 2)), ("$5", 5),
    ("-$5", -5), ("$7$", 7), (".5", Fraction(1, 2)), ("1.e3", 1000), ("2.5e-1", Fraction(1, 4)),
    ("\u22127", -7), ("007", 7),
    ("1,23", None), ("3/0", None), ("abc", None), ("1 2", None), ("", None), ("--1", None),
    ("1_000", None), ("0x10", None), ("inf", None), ("nan", None), ("\u0663", None),
    ("1/2/3", None), ("__import__('os')", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_reading(text, expected):
    assert parse_number(text) == expected


@pytest.mark.parametrize("text", ["9" * 300, "1e1001", "1e-99999999999", "1/" + "9" * 5000])
def test_caps_come_before_computing(text):
    with pytest.raises(TooLarge):
        parse_number(text)


@given(st.integers(-(10**40), 10**40))
def test_written_forms_of_an_integer_agree(value):
    assert parse_number(str(value)) == parse_number(f"{value:,}") == parse_number(f" {value}.0 ")


@given(st.fractions())
def test_fractions_are_exact(value):
    assert parse_number(str(value)) == value


@given(st.text(alphabet="0123456789.,/%$-+eE \\frac{}", max_size=40))
def test_any_text_is_survived(text):
    try:
        value = parse_number(text)
    except TooLarge:
        return
    assert value is None or isinstance(value, Fraction | int)
