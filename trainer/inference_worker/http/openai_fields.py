"""Typed reading of a JSON body's members; whatever is wrong is refused by name."""

from __future__ import annotations

import json
from typing import Any

from trainer.inference_worker.http.http_checks import is_unicode
from trainer.inference_worker.http.http_limits import Refused


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """The members of one object. Every reader takes its member away; ``end`` refuses the rest.

    A member that is null counts as absent, as OpenAI's clients send it.
    """

    def __init__(self, members: dict[str, Any]) -> None:
        self._left = {name: value for name, value in members.items() if value is not None}

    @classmethod
    def of(cls, body: bytes) -> Fields:
        """Decode a body. Raises ``Refused``."""
        try:
            members = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as e:
            raise Refused(400, f"the body is not valid JSON: {e}") from e
        if not isinstance(members, dict):
            raise Refused(400, f"the body is {named(members)}; give a JSON object")
        return cls(members)

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return name in self._left

    def any(self, name: str) -> Any:
        """Whatever it is; None if absent."""
        return self._left.pop(name, None)

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._left.pop(name, default)
        if not isinstance(value, str) or not is_unicode(value):
            raise wrong(name, value, "a string of valid Unicode")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``."""
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self._left.pop(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and abs(value) < 1e300):  # an integer may be too large for a float
            raise wrong(name, value, "a finite number")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings."""
        value = self._left.pop(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise wrong(name, value, "a string or a list of strings")
        return tuple(values)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers."""
        value = self._left.pop(name, [])
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise wrong(name, value, "a list of integers")
        return tuple(value)

    def biases(self, name: str) -> tuple[tuple[int, float], ...]:
        """An object of numbers by token id, as pairs."""
        value = self._left.pop(name, {})
        if not isinstance(value, dict):
            raise wrong(name, value, "an object of token ids and numbers")
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) < 11):
                raise wrong(name, key, "token ids as keys")
        biases = Fields(value)
        return tuple((int(key), biases.number(key, 0.0)) for key in value)

    def only(self, name: str, *allowed: Any) -> None:
        """A feature that is not there: only values that ask for nothing are accepted."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            raise Refused(
                400, f"{name} = {_short(value)} is not supported; leave it out", param=name
            )

    def end(self) -> None:
        """Refuse what nobody has read."""
        for name in self._left:
            short = _short(name)
            raise Refused(400, f"{short} is not a parameter this server knows", param=short)


def wrong(name: str, value: object, allowed: str) -> Refused:
    """The refusal of a member's value."""
    return Refused(400, f"{name} is {named(value)}; give {allowed}", param=name)


def _short(value: object) -> str:
    return value[:60] if isinstance(value, str) else named(value)


def named(value: object) -> str:
    """A value's kind, with the value where it is small; however deep, huge or odd it is."""
    match value:
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case str():
            return f"the string {value[:40]!r}"
        case bool() | None:
            return json.dumps(value)
        case _:
            return str(value) if abs(value) < 1e15 else "a huge number"
