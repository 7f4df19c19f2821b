"""Whether a run folder belongs to a configuration: pure comparison of two section trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAY_CHANGE = (("stop", ""), ("endpoint", "port"))
"""What a resumed run may change: a whole section (no key) or one key."""

Tree = Mapping[str, Mapping[str, Any]]


def differing_keys(stored: Tree, wanted: Tree) -> tuple[str, ...]:
    """Return ``section.key: stored -> wanted`` for every difference that a resume refuses.

    >>> differing_keys({"run": {"seed": 0}}, {"run": {"seed": 1}})
    ('run.seed: 0 -> 1',)
    """
    changes = []
    for section in sorted({*stored, *wanted}):
        old, new = stored.get(section, {}), wanted.get(section, {})
        for key in sorted({*old, *new}):
            if (section, "") in MAY_CHANGE or (section, key) in MAY_CHANGE:
                continue
            before, after = _plain(old.get(key)), _plain(new.get(key))
            if before != after:
                changes.append(f"{section}.{key}: {_shown(before)} -> {_shown(after)}")
    return tuple(changes)


def _plain(value: Any) -> Any:
    """Tuples and lists are one kind in TOML, and so are 1 and 1.0 in a number's place."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _shown(value: Any) -> str:
    text = "(not set)" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
