"""Prompts from a JSON lines file: one object a line, columns named in ``PromptsConfig``.

Example line: ``{"question": "What is 2+3?", "answer": "#### 5", "level": 1}``
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.contracts.errors import ConfigError
from infra.contracts.records import Message, Prompt
from infra.run_config import PromptsConfig

ROLES = ("system", "user", "assistant", "tool", "text")


def read_prompts(config: PromptsConfig) -> Iterator[Prompt]:
    """Yield one prompt per row (duplicates included), at most ``config.limit``.

    Raises:
        ConfigError: file, line, what is wrong and what is expected.
    """
    if "{question}" not in config.template:
        raise ConfigError(f"template = {config.template!r} lacks {{question}}; put it in")
    path = Path(config.path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ConfigError(
            f"prompt file {path}: no such file; set [prompts] path to a JSON lines file"
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"prompt file {path}: cannot be read as UTF-8 text: {e}") from e
    count = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _prompt(config, _row(line, f"{path}:{number}"), f"{path}:{number}", path.stem)
            count += 1
        if config.limit and count == config.limit:
            return
    if count == 0:
        raise ConfigError(f"prompt file {path} is empty; give at least one JSON object a line")


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise ConfigError(f"{where}: not JSON: {e.msg} at column {e.colno}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {type(row).__name__}; each line must be a JSON object")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: half a surrogate pair (\\ud800..\\udfff); not text") from None
    return row


def _prompt(config: PromptsConfig, row: dict[str, Any], where: str, source: str) -> Prompt:
    metadata = {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in row.items()
        if key not in (config.question, config.answer)
    }
    return Prompt(
        messages=_messages(config, _column(row, config.question, "question", where), where),
        source=source,
        answer=_answer(config, row, where),
        metadata=metadata,
    )


def _column(row: dict[str, Any], name: str, setting: str, where: str) -> Any:
    if name not in row:
        raise ConfigError(
            f"{where}: no column '{name}'; present: {', '.join(row) or 'none'}; "
            f"set [prompts] {setting}"
        )
    return row[name]


def _messages(config: PromptsConfig, question: Any, where: str) -> tuple[Message, ...]:
    if isinstance(question, str) and question.strip():
        text = config.template.replace("{question}", question)
        return (Message(role=config.role, content=text),)
    if not isinstance(question, list) or not question:
        raise ConfigError(
            f"{where}: column '{config.question}' must be a text or a list of "
            f"{{role, content}} messages, and not empty"
        )
    for turn in question:
        fits = isinstance(turn, dict) and isinstance(turn.get("content"), str)
        if not fits or turn.get("role") not in ROLES or set(turn) != {"role", "content"}:
            raise ConfigError(
                f"{where}: message {json.dumps(turn)[:80]} must be exactly "
                f'{{"role": {"|".join(ROLES)}, "content": text}}'
            )
        if turn["role"] == "text" and len(question) > 1:
            raise ConfigError(f"{where}: a message of role 'text' must stand alone")
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in question)


def _answer(config: PromptsConfig, row: dict[str, Any], where: str) -> str | None:
    """Return the reference answer as text; None when the configuration names no column."""
    if not config.answer:
        return None
    value = _column(row, config.answer, 'answer (answer = "" for none)', where)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(
            f"{where}: column '{config.answer}' holds {json.dumps(value)[:40]}; give a text or a "
            'number, or set [prompts] answer = "" if the scorer needs none'
        )
    text = str(value)
    if config.answer_after:
        _, mark, text = text.rpartition(config.answer_after)
        if not mark:
            raise ConfigError(f"{where}: no {config.answer_after!r} (answer_after) in the answer")
    if not text.strip():
        raise ConfigError(f"{where}: column '{config.answer}' is empty; give the reference answer")
    return text.strip()
