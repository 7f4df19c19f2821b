"""One response's text while it grows: whole characters only, and nothing of a stop string.

A token may be part of a character, so text is taken from a window of ids that begins and ends where
the text is whole: a token costs the same at the end of a long response as at its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character (yet)."""


class TextStream:
    """Pieces given by ``add`` and ``finish`` join to the final text, cut before its stop string."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._start = self._end = 0
        """ids[start:end] is text already taken; what follows is not whole yet."""
        self._held = ""
        """Taken, but perhaps the beginning of a stop string."""
        self._sent = ""
        self._stopped = False

    def add(self, token: int) -> str:
        """Take a token; return the text that may be sent now."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._end])
        text = self._decode(self._ids[self._start :])
        if self._stopped or len(text) <= len(before) or text.endswith(_BROKEN):
            return ""
        self._start, self._end = self._end, len(self._ids)
        self._held += text[len(before) :]
        free = cut(self._held, self._stops)
        self._stopped = free != self._held
        if not self._stopped:
            free = self._held[: len(self._held) - _may_begin(self._held, self._stops)]
        return self._send(free)

    def finish(self, text: str) -> str:
        """Return what is left to send of the final text."""
        text = cut(text, self._stops)
        return self._send(text[len(self._sent) :] if text.startswith(self._sent) else "")

    def _send(self, text: str) -> str:
        self._sent += text
        self._held = self._held[len(text) :]
        return text


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to where its first stop string begins.

    >>> cut("7 is prime. Q: 8", ("Q:", "."))
    '7 is prime'
    """
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop string begins with."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
