"""The error vocabulary: errors cross rooms only as one of these.

Each message says what was given, what is allowed and what to do. ``main`` functions print the
message as one line and exit with ``exit_code``; everything else is a bug and shows its traceback.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """A problem the user, the operator or the caller can do something about."""

    exit_code = 1


class ConfigError(HeadraceError):
    """The configuration, a command line or an input file is wrong."""

    exit_code = 2


class StorageError(HeadraceError):
    """An object could not be read or written; names the object."""

    exit_code = 3


class DamagedObject(StorageError):
    """Bytes were read but do not match their size or checksum. Never half-used."""


class SchemaMismatch(StorageError):
    """A record or shard was written by a newer schema, or is not what it claims to be."""


class NewerSchema(SchemaMismatch):
    """Written by a newer program: intact, but not ours to read. Never quarantined."""


class InferenceError(HeadraceError):
    """A generation request failed after its retries; ``retryable``: whether more could help."""

    exit_code = 4

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class ScorerError(HeadraceError):
    """A scorer itself failed (not the answer it judged)."""


class Fenced(HeadraceError):
    """Another incarnation of an exclusive role (controller, trainer) has taken over."""

    exit_code = 75  # EX_TEMPFAIL: the supervisor must not restart it blindly


class Preempted(HeadraceError):
    """SIGTERM arrived; everything was saved."""

    exit_code = 76
