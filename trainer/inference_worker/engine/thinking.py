"""The end of thinking, forced after a budget: on the device, and once more in plain Python.

A slot thinks from its first mark (the whole sequence of its token ids) to its second. When it has
thought as many tokens as it may, the second mark is written for it, one token per step. Those were
not sampled: the device gives them log-probs of 0, and the host, which follows the same rule over
the same ids, marks them. The host's ``Thinker`` also says where a slot stands at its insertion,
since the prompt, or an earlier segment, may end within thinking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MARK_TOKENS = 16
"""Longest mark."""
ANY = -1
"""Fills a mark up on its left."""


class Thinking(NamedTuple):
    """Per-slot state, arrays of int32."""

    budget: jax.Array
    """[slots]; 0: no limit, nothing is followed."""
    first: jax.Array
    """[slots, MARK_TOKENS], ends with the mark that opens."""
    last: jax.Array
    """[slots, MARK_TOKENS], ends with the mark that closes."""
    recent: jax.Array
    """[slots, MARK_TOKENS], the newest ids at the end."""
    thought: jax.Array
    """[slots], tokens within thinking so far; -1 outside."""


class SlotThinking(NamedTuple):
    """One slot's share, as plain values."""

    budget: int = 0
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    recent: tuple[int, ...] = ()
    thought: int = -1


def columns_of(slots: Sequence[SlotThinking], count: int) -> Thinking:
    """Columns of length ``count``, as numpy arrays; the rest is without limit."""
    found = Thinking(
        np.zeros(count, np.int32),
        *(np.full((count, MARK_TOKENS), ANY, np.int32) for _ in range(3)),
        np.full(count, -1, np.int32),
    )
    for i, slot in enumerate(slots):
        found.budget[i], found.thought[i] = slot.budget, slot.thought
        for row, ids in ((found.first, slot.first), (found.last, slot.last)):
            row[i, MARK_TOKENS - len(ids) :] = ids
        ids = slot.recent[-MARK_TOKENS:]
        found.recent[i, MARK_TOKENS - len(ids) :] = ids
    return found


def forced_tokens(thinking: Thinking) -> tuple[jax.Array, jax.Array]:
    """Return [slots]: whether the next token is forced, and which it is then."""
    forced = (thinking.budget > 0) & (thinking.thought >= thinking.budget)
    length = (thinking.last != ANY).sum(axis=1)
    at = MARK_TOKENS - length + thinking.thought - thinking.budget
    at = jnp.clip(at, 0, MARK_TOKENS - 1)
    return forced, jnp.take_along_axis(thinking.last, at[:, None], axis=1)[:, 0]


def follow(thinking: Thinking, token: jax.Array) -> Thinking:
    """Take each slot's newest token [slots]."""
    recent = jnp.concatenate([thinking.recent[:, 1:], token[:, None]], axis=1)

    def ends_with(mark: jax.Array) -> jax.Array:
        return ((mark == ANY) | (mark == recent)).all(axis=1)

    inside = thinking.thought >= 0
    thought = jnp.where(
        inside,
        jnp.where(ends_with(thinking.last), -1, thinking.thought + 1),
        jnp.where(ends_with(thinking.first), 0, -1),
    )
    return thinking._replace(recent=recent, thought=jnp.where(thinking.budget > 0, thought, -1))


NOT_THINKING = SlotThinking()


class Thinker:
    """The same rule over one sample's ids, on the host."""

    def __init__(self, budget: int, first: Iterable[int], last: Iterable[int]) -> None:
        self._budget, self._first, self._last = budget, tuple(first), tuple(last)
        self._recent: tuple[int, ...] = ()
        self._thought = -1

    def take(self, token: int) -> bool:
        """Follow the next token; True if it was forced, had this slot drawn it."""
        forced = self._thought >= self._budget
        self._recent = (*self._recent, token)[-MARK_TOKENS:]
        if self._thought >= 0:
            closed = self._recent[-len(self._last) :] == self._last
            self._thought = -1 if closed else self._thought + 1
        elif self._recent[-len(self._first) :] == self._first:
            self._thought = 0
        return forced

    def read(self, ids: Iterable[int]) -> None:
        """Follow what the slot is given, not what it draws."""
        for token in ids:
            self.take(int(token))
        # A prompt that is over the budget already has written none of the mark yet.
        self._thought = min(self._thought, self._budget)

    @property
    def slot(self) -> SlotThinking:
        """Where it stands."""
        return SlotThinking(self._budget, self._first, self._last, self._recent, self._thought)
