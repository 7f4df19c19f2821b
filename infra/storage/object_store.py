"""The object store: the one interface through which a run is read and written.

Keys are relative POSIX paths (``rollouts/00000000/ab12.parquet``); a key is never a folder too, and
no part of one starts with a dot. A store never shows a half-written object. A prefix is compared as
text, as in a bucket: end it with ``/`` to mean a folder (``metrics/pipeline-1`` also begins
``metrics/pipeline-12/...``). Implementations: ``memory_store``, ``local_store``, ``gcs_store``;
``open_store`` picks one by URL scheme. All pass ``tests/contracts/object_store_contract.py``, but
for one thing: a bucket cannot refuse a key that is a folder too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

Token = str
"""Names one exact state of one object (a generation on GCS, a content digest locally)."""


class ObjectStore(Protocol):
    """Named immutable bytes, plus compare-and-swap for the few that change."""

    url: str
    """Where it is, for messages and for handing to another process."""

    def read(self, key: str) -> bytes:
        """Return the whole object. Raises ``KeyError`` when absent, ``StorageError`` on I/O."""

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``start``; ``DamagedObject`` if there are fewer."""

    def view(self, key: str) -> memoryview:
        """The whole object, read-only, without a copy where the store can (local: mapped)."""

    def read_with_token(self, key: str) -> tuple[bytes, Token] | None:
        """Return the bytes and their token, or None when absent."""

    def create(
        self, key: str, data: bytes | Iterable[bytes | memoryview], *, durable: bool = True
    ) -> bool:
        """Create if absent, durable on return. False (and no change) if the key exists.

        With ``durable=False`` the object may be damaged after the *machine* (not the process)
        crashes: only for what carries checksums and can be made again from durable objects.
        """

    def compare_and_swap(self, key: str, data: bytes, expected: Token | None) -> Token | None:
        """Replace the object whose token is ``expected`` (None: absent). None if it differs."""

    def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        """Keys under ``prefix`` strictly greater than ``after``, ascending, at most ``limit``."""

    def list_folders(self, prefix: str, after: str = "") -> list[str]:
        """Names of the immediate sub-folders of ``prefix`` greater than ``after``, ascending."""

    def delete(self, key: str) -> None:
        """Remove the object; absent is fine."""
