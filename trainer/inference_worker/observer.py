"""What a scheduler tells whoever wants to know."""

from __future__ import annotations


class Observer:
    """What a scheduler tells; called from its threads, so be quick. The base class ignores all."""

    def behind(self, version: int) -> None:
        """A request needs ``version``, which is not here yet."""

    def swapped(self, version: int) -> None:
        """The engine uses ``version`` from now on."""

    def first_token(self, version: int) -> None:
        """The first token under ``version`` has been drawn."""
