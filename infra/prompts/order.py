"""The order of prompts: a counter-based permutation per epoch, without a shuffle buffer.

Position 0, 1, 2, ... goes through the prompt set again and again; which prompt stands at a position
is a pure function of (seed, size, position), so a restarted controller needs only a number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

ROUNDS = 6


def permute(index: int, size: int, key: bytes) -> int:
    """Map ``index`` to its place in the permutation of ``range(size)`` that ``key`` names.

    A Feistel network over the smallest square power of four that holds ``size``, walked until it
    falls inside (fewer than four rounds of it on average; format-preserving encryption, Black and
    Rogaway 2002).

    >>> sorted(permute(i, 5, b"k") for i in range(5))
    [0, 1, 2, 3, 4]
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(
                right.to_bytes(8, "little") + bytes([number]), digest_size=8, key=key
            ).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """Which prompt (by its index in the set) stands at a position."""

    size: int
    """Prompts in the set."""
    seed: int
    shuffle: bool = True
    """False: the set's own order, in every epoch."""
    epochs: int = 0
    """Passes over the set; 0 is endless."""

    def at(self, position: int) -> int | None:
        """Return the prompt's index, or None beyond the last epoch or in an empty set."""
        if self.size == 0 or (self.epochs and position >= self.epochs * self.size):
            return None
        epoch, index = divmod(position, self.size)
        if not self.shuffle:
            return index
        return permute(index, self.size, f"headrace order {self.seed} {epoch}".encode()[:64])
