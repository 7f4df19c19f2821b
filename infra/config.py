"""Strict configuration: TOML tables into frozen dataclasses, all problems in one error.

Unknown keys are errors that name the nearest known one. A section's dataclass stands beside its
user; ``run_config`` says which sections exist and whose they are.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from infra.contracts.errors import ConfigError

T = TypeVar("T")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ``ConfigError`` with file, line and what to do."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML configuration") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as e:
        raise ConfigError(f"{path}: cannot be read as TOML: {e}") from e


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply ``section.key=value`` items; values are TOML, bare words are strings."""
    out = {k: dict(v) if isinstance(v, dict) else v for k, v in tree.items()}
    for item in overrides:
        name, eq, text = item.partition("=")
        section, dot, key = (part.strip() for part in name.partition("."))
        if not (eq and dot and section and key):
            raise ConfigError(f"--set {item}: give section.key=value, e.g. optimizer.lr=1e-5")
        table = out.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {item}: '{section}' is {table!r}, not a section with keys")
        table[key] = _value(text.strip())
    return out


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant: ``; did you mean 'lr'?`` or the whole list."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"


def parse_section(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build dataclass ``cls`` from a TOML table; ``where`` is ``file [section]`` for messages.

    Raises:
        ConfigError: one message with every unknown key, wrong type and failed check.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems, values = [], {}
    for key, value in table.items():
        if key not in fields:
            problems.append(f"unknown key '{key}'; {nearest(key, fields)}")
            continue
        try:
            values[key] = _coerce(value, hints[key])
        except TypeError as e:
            problems.append(f"{key} = {value!r}: {e}")
    required = (
        f.name
        for f in fields.values()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    problems += [f"'{name}' is missing" for name in required if name not in table]
    if not problems:
        try:
            return cls(**values)
        except ValueError as e:
            problems.append(str(e))
    raise ConfigError(f"{where}: " + "; ".join(problems))


def _coerce(value: Any, hint: Any) -> Any:
    """Return ``value`` as the annotated type; only int -> float and list -> tuple convert."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        allowed = [a for a in args if a is not type(None)]
        if len(allowed) == 1:
            return _coerce(value, allowed[0])
        for candidate in allowed:
            try:
                return _coerce(value, candidate)
            except TypeError:
                continue
        raise TypeError(f"expected {' or '.join(_name(a) for a in allowed)}")
    if origin is typing.Literal:
        if value not in args:
            raise TypeError(f"must be one of {', '.join(map(repr, args))}")
        return value
    if origin in (tuple, dict):
        return _coerce_items(value, origin, args)
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"expected {_name(hint)}, got {type(value).__name__}")
    return value


def _coerce_items(value: Any, origin: type, args: tuple[Any, ...]) -> Any:
    """The items of a ``tuple[T, ...]``, ``tuple[T, U]`` or ``dict[str, T]``."""
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError("expected a list")
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise TypeError(f"expected a list of {len(args)} items")
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        return tuple(map(_coerce, value, hints))
    if not isinstance(value, dict):
        raise TypeError("expected a table")
    return {key: _coerce(item, args[1]) for key, item in value.items()}


def _name(hint: Any) -> str:
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def to_toml(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Write sections of plain values as TOML (only what our configurations hold)."""
    lines: list[str] = []
    for section, table in tree.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_literal(value)}" for key, value in table.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\\x7f' else c for c in value)
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_literal(str(k))} = {_literal(v)}" for k, v in value.items()) + "}"
        )
    return repr(value)
