"""Chat templates: a conversation into the exact text the model was trained on.

Templates come with models and are untrusted, so they run in Jinja's immutable sandbox, with the
block trimming and the few names that Hugging Face promises them. Nothing that reads a clock is
offered: the same messages give the same text for ever.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from infra.contracts.errors import ConfigError
from infra.contracts.records import Message


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """``special_tokens``: names such as ``bos_token`` that the template may use."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ConfigError(f"chat template, line {e.lineno}: {e.message}") from e
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text up to where the assistant's answer begins.

        Raises:
            ValueError: the template refuses these messages (an unknown role, a wrong order).
        """
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as e:
            raise ValueError(f"the chat template refuses these messages: {e}") from e


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """Unlike Jinja's own filter, does not escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
