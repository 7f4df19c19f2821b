"""Find the answer in a response: extraction, apart from judging it.

Each method maps the text after the last ``</think>`` to a candidate, or None. Methods are tried in
order and the first that finds something decides, so a wrong box is never rescued by a later number.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_ANSWER_LINE = re.compile(
    r"[ \t*_#]*(?:(?:the[ \t]+)?(?:final[ \t]+)?answer(?:[ \t]+is)?[ \t*_]*:|####|a:)[ \t*_]*(.*)",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+\u2212])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?%?",
    re.ASCII,
)


class Extraction(NamedTuple):
    """What was found and how; ``method`` is ``""`` when nothing was."""

    candidate: str
    method: str


def first_line(text: str) -> str | None:
    """The first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


def last_line(text: str) -> str | None:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def whole(text: str) -> str | None:
    """Everything, stripped."""
    return text.strip() or None


def boxed(text: str) -> str | None:
    r"""Contents of the last ``\boxed{...}`` or ``\fbox{...}``, braces counted; None if unclosed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for i in range(start, len(text)):
        if text[i] == "\\":
            continue
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
        if depth == 0:
            return text[start:i].strip()
    return None


def answer_line(text: str) -> str | None:
    """What follows the last ``Answer:``, ``####`` or ``A:`` at a line's start, or its next line."""
    lines = text.splitlines()
    for i in range(len(lines) - 1, -1, -1):
        match = _ANSWER_LINE.match(lines[i])
        if match:
            return match[1].strip(" \t*_") or first_line("\n".join(lines[i + 1 :]))
    return None


def last_number(text: str) -> str | None:
    """The last number (``-1,234.5``, ``3/4``, ``1e3``, ``5%``) in the text."""
    found = deque(_NUMBER.finditer(text), maxlen=1)
    return found[0][0].rstrip(",") if found else None


METHODS: dict[str, Callable[[str], str | None]] = {
    "first_line": first_line,
    "last_line": last_line,
    "boxed": boxed,
    "answer_line": answer_line,
    "last_number": last_number,
    "whole": whole,
}


def extract(response: str, methods: Iterable[str]) -> Extraction:
    """Apply ``methods`` in order to what follows the thinking part.

    Returns:
        The first candidate found. Nothing where a ``<think>`` was opened and never closed: an
        answer inside an unfinished thought is not given.
    """
    _, closed, answer = response.rpartition(THINK_CLOSE)
    if THINK_OPEN in answer:
        return Extraction("", "")
    text = answer if closed else response
    for name in methods:
        candidate = METHODS[name](text)
        if candidate is not None:
            return Extraction(candidate, name)
    return Extraction("", "")
