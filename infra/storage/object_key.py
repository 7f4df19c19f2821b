"""What a valid key is, and the token of an object's content: the same rules for every store."""

from __future__ import annotations

import hashlib

from infra.contracts.errors import StorageError

HIDDEN = "."
"""Parts that start with it are the stores' own (temporary files, locks): no keys, never listed."""


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it. Raises ``StorageError`` otherwise."""
    parts = key.split("/")
    if not all(parts) or "\0" in key or any(part.startswith(HIDDEN) for part in parts):
        raise StorageError(
            f"key {key!r} is not allowed; give a relative path without empty parts and without "
            "parts that start with a dot, e.g. 'ledger/step-00000001.json'"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix``, the beginning of some valid keys (or empty). Raises ``StorageError``."""
    check_key(f"{prefix}x")
    return prefix


def content_token(data: bytes) -> str:
    """Token of an object whose content is ``data``."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
