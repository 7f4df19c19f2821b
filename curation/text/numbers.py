"""Read a written number exactly, as a fraction, without ever evaluating text.

Accepts integers, decimals, thousands separators, scientific notation, ``a/b``, ``\\frac{a}{b}``,
``w a/b``, percent, a leading currency sign and ``$...$`` around it. Digits and exponents are capped
before anything is computed.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

MAX_DIGITS = 256
MAX_EXPONENT = 1_000

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"([-+]?)({_DECIMAL})(%?)", re.ASCII)
_FRACTION = re.compile(r"([-+]?)(?:(\d+) +)?(\d+) */ *(\d+)", re.ASCII)
_LATEX_FRACTION = re.compile(r"([-+]?) *(\d*) *\\[dt]?frac *\{ *(\d+) *\} *\{ *(\d+) *\}", re.ASCII)


class TooLarge(ValueError):
    """The number is beyond the caps; nothing was computed."""


@functools.lru_cache(maxsize=2048)  # a group repeats its gold and often its answers
def parse_number(text: str) -> Fraction | None:
    """Return the exact value, or None where ``text`` is not one plain number.

    Raises:
        TooLarge: more than ``MAX_DIGITS`` digits or an exponent beyond ``MAX_EXPONENT``.
    """
    text = _bare(text)
    if sum(c.isdigit() for c in text) > MAX_DIGITS:
        if re.fullmatch(r"[-+\d.,eE/% ]+", text):
            raise TooLarge(f"more than {MAX_DIGITS} digits")
        return None
    if match := _FRACTION.fullmatch(text) or _LATEX_FRACTION.fullmatch(text):
        sign, mixed, top, bottom = match.groups()
        if int(bottom) == 0:
            return None
        value = int(mixed or 0) + Fraction(int(top), int(bottom))
        return -value if sign == "-" else value
    if match := _NUMBER.fullmatch(text):
        sign, digits, percent = match.groups()
        exponent = re.split("[eE]", digits)[1:]
        if exponent and abs(int(exponent[0])) > MAX_EXPONENT:
            raise TooLarge(f"exponent beyond {MAX_EXPONENT}")
        value = Fraction(digits.replace(",", ""))
        value = value / 100 if percent else value
        return -value if sign == "-" else value
    return None


def _bare(text: str) -> str:
    """Strip what surrounds a number in prose or LaTeX without changing its value."""
    text = text.strip().replace("\u2212", "-").replace("{,}", ",").replace("\\%", "%")
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text = text.replace("\\$", "$").rstrip(". ")
    return re.sub(r"^([-+]?) ?[$\u20ac\u00a3] ?", r"\1", text).strip()
