"""Guess from a JSON lines file what a configuration has to say about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.contracts.errors import ConfigError

QUESTION_NAMES = (
    *("question", "prompt", "problem", "messages", "instruction", "query", "input", "text"),
)
ANSWER_NAMES = (
    *("answer", "solution", "target", "gold", "expected_answer", "label", "output", "response"),
)
ANSWER_MARKS = ("#### ",)
LOOKED_AT = 200
HELD_OUT = 96
"""Prompts that are enough for an interval of about ten points."""


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """What was found in the first rows."""

    question: str
    answer: str
    """Column; empty when there is none."""
    answer_after: str
    rows: int
    longest_chars: int
    """Of the prompts looked at, all turns together."""

    @property
    def held_out(self) -> float:
        """Share that gives about ``HELD_OUT`` prompts, at most a fifth of a small set."""
        return round(min(0.2, max(HELD_OUT / self.rows, 0.01)), 3)


def inspect_prompts(path: str, question: str = "", answer: str | None = None) -> PromptFile:
    """Look at the file and guess; names that are given are taken as they are.

    Raises:
        ConfigError: not a file of JSON objects, or no column looks like a question.
    """
    lines = _lines(path)
    rows = [_row(line, f"{path}:{number}") for number, line in lines[:LOOKED_AT]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    in_all = [name for name in columns if all(name in row for row in rows)]
    question = question or _first(QUESTION_NAMES, in_all)
    if question not in in_all:
        raise ConfigError(
            f"{path}: no column looks like the question; columns: {', '.join(columns)}; "
            "name one with --question"
        )
    if answer is None:
        answer = _first(ANSWER_NAMES, [name for name in in_all if name != question])
    elif answer and answer not in in_all:
        raise ConfigError(f"{path}: no column '{answer}' in every row; {', '.join(columns)}")
    golds = [str(row[answer]) for row in rows] if answer else []
    marks = [mark for mark in ANSWER_MARKS if golds and all(mark in gold for gold in golds)]
    return PromptFile(
        question=question,
        answer=answer,
        answer_after=marks[0] if marks else "",
        rows=len(lines),
        longest_chars=max(_chars(row[question]) for row in rows),
    )


def _lines(path: str) -> list[tuple[int, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give a JSON lines file with prompts") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {e}") from e
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: it is empty; give at least one JSON object a line")
    return lines


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise ConfigError(f"{where}: not JSON: {e.msg}; give one JSON object a line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {type(row).__name__}; each line must be a JSON object")
    return row


def _first(wanted: Sequence[str], present: Sequence[str]) -> str:
    by_lower = {name.lower(): name for name in reversed(present)}
    return next((by_lower[name] for name in wanted if name in by_lower), "")


def _chars(question: Any) -> int:
    if isinstance(question, list):
        turns = (turn.get("content", "") for turn in question if isinstance(turn, dict))
        return sum(len(str(text)) for text in turns)
    return len(str(question))
