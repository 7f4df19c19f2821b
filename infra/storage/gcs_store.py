"""The object store in a Google Cloud Storage bucket: ``gs://bucket/prefix``.

Every write names the generation it replaces (0: none), so it may be repeated without harm. A
repeated write whose first answer was lost comes back as *precondition failed*; each object
therefore carries the random id of the attempt that wrote it, by which a writer knows its own work.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import secrets
from collections.abc import Iterable

from google.api_core.exceptions import NotFound, PreconditionFailed, RequestRangeNotSatisfiable
from google.cloud.storage import Blob

from infra.contracts.errors import ConfigError, DamagedObject, StorageError
from infra.storage.gcs_session import TIMEOUT, GcsSession
from infra.storage.object_key import check_key, check_prefix
from infra.storage.object_store import Token
from infra.storage.resumable_upload import cut, upload_chunks

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_BYTES = "application/octet-stream"
_ATTEMPT = "headrace-attempt"
_FOLLOWS = "headrace-follows"
"""Metadata of every object: the attempt that wrote it, and the generation that it replaced."""
_ONE_REQUEST = 8 << 20
"""The library sends more in several requests, and does not ask how much of a broken one arrived."""
_PAGE = 1000
"""The most keys that one listing request returns."""


class GcsStore:
    """Implements ``ObjectStore``; safe from several threads, to be made after a fork.

    Unlike a folder, a bucket holds ``a`` and ``a/b`` at once: that a key is never a folder too is
    the caller's duty here (``run_layout`` keeps it).
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str = "",
        deadline_secs: float = 60.0,
        first_wait_secs: float = 0.5,
        chunk_bytes: int = 32 << 20,
    ) -> None:
        """Sign in; the bucket is not asked yet.

        Args:
            endpoint: address of an emulator; by default ``STORAGE_EMULATOR_HOST``, else Google.
            deadline_secs: after this a failed request is not tried again.
            first_wait_secs: the most before the first retry; doubles up to 16 s.
            chunk_bytes: larger objects are uploaded in chunks of this size, n times 256 KiB.

        Raises:
            ConfigError: no bucket can have this name.
            StorageError: there are no credentials, or no key can have this prefix.
        """
        prefix = prefix.strip("/")
        self.url = f"gs://{bucket}/{prefix}".removesuffix("/")
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(f"{self.url}: {bucket!r} is no bucket's name; give gs://bucket/path")
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._chunk_bytes = chunk_bytes
        self._session = GcsSession(
            bucket,
            self.url,
            endpoint=endpoint,
            deadline_secs=deadline_secs,
            first_wait_secs=first_wait_secs,
        )

    def read(self, key: str) -> bytes:
        return self._download(key)[0]

    def read_range(self, key: str, start: int, length: int) -> bytes:
        size = "fewer"
        if start >= 0 and length > 0:
            data = self._download(key, start=start, end=start + length - 1)[0]
            if len(data) == length:
                return data
        else:  # HTTP has no such range
            blob = self._stat(key)
            if blob is None:
                raise KeyError(key)
            if length == 0 and 0 <= start <= blob.size:
                return b""
            size = str(blob.size)
        raise DamagedObject(
            f"{self.url}/{key}: bytes {start}..{start + length} wanted, it has {size}"
        )

    def view(self, key: str) -> memoryview:
        """The whole object, downloaded: in a bucket a view saves nothing over ``read``."""
        return memoryview(self.read(key))

    def read_with_token(self, key: str) -> tuple[bytes, Token] | None:
        try:
            data, blob = self._download(key)
        except KeyError:
            return None
        if blob.generation is None:
            raise StorageError(f"{self.url}/{key}: the answer lacks x-goog-generation; is it GCS?")
        return data, str(blob.generation)

    def create(
        self, key: str, data: bytes | Iterable[bytes | memoryview], *, durable: bool = True
    ) -> bool:
        del durable  # in a bucket everything is
        return self._put(key, data, 0) is not None

    def compare_and_swap(self, key: str, data: bytes, expected: Token | None) -> Token | None:
        if expected and not expected.isdecimal():
            check_key(key)
            return None  # the token of another store
        return self._put(key, data, int(expected or 0))

    def list_after(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        check_prefix(prefix)
        if limit <= 0:
            return []
        with self._session.naming(prefix, "list"):
            blobs = self._session.bucket.list_blobs(
                prefix=self._prefix + prefix,
                start_offset=self._prefix + after if after else None,
                page_size=min(limit + 1, _PAGE),  # ``after`` itself may come first
                fields="items/name,nextPageToken",
                retry=self._session.retry(),
                timeout=TIMEOUT,
            )
            keys = (blob.name[len(self._prefix) :] for blob in blobs)
            return list(itertools.islice((k for k in keys if k > after and _is_key(k)), limit))

    def list_folders(self, prefix: str, after: str = "") -> list[str]:
        folder = self._prefix + (check_prefix(prefix).removesuffix("/") + "/" if prefix else "")
        with self._session.naming(prefix, "list"):
            listing = self._session.bucket.list_blobs(
                prefix=folder,
                delimiter="/",
                start_offset=folder + after if after else None,
                fields="prefixes,nextPageToken",
                retry=self._session.retry(),
                timeout=TIMEOUT,
            )
            for _ in listing.pages:
                pass  # the folders gather in ``prefixes``
            names = (name[len(folder) : -1] for name in listing.prefixes)
            return sorted(name for name in names if name > after and _is_key(name))

    def delete(self, key: str) -> None:
        blob = self._blob(key)
        with self._session.naming(key, "delete"):
            try:
                self._session.call(blob.delete)
            except NotFound as e:
                self._session.require_bucket(e)

    def _blob(self, key: str) -> Blob:
        return self._session.bucket.blob(self._prefix + check_key(key))

    def _download(self, key: str, **span: int) -> tuple[bytes, Blob]:
        """Return bytes and the blob they came with. A whole read is checked by its crc32c."""
        blob = self._blob(key)
        with self._session.naming(key, "read"):
            try:
                return self._session.call(blob.download_as_bytes, checksum="crc32c", **span), blob
            except RequestRangeNotSatisfiable:
                return b"", blob
            except NotFound as e:
                self._session.require_bucket(e)
        raise KeyError(key)

    def _stat(self, key: str) -> Blob | None:
        """What is known of the object, without its bytes; None when absent."""
        blob = self._blob(key)
        with self._session.naming(key, "read"):
            try:
                self._session.call(blob.reload)
            except NotFound as e:
                self._session.require_bucket(e)
                return None
        return blob

    def _put(
        self, key: str, data: bytes | Iterable[bytes | memoryview], expected: int
    ) -> Token | None:
        """Write if ``expected`` is the generation now; return the new one, or None if it is not."""
        blob, attempt = self._blob(key), secrets.token_hex(8)
        blob.metadata = {_ATTEMPT: attempt, _FOLLOWS: str(expected)}
        chunks = cut(data, self._chunk_bytes)
        first, second = next(chunks, b""), next(chunks, None)
        lost: list[Exception] = []
        with self._session.naming(key, "write"), contextlib.suppress(PreconditionFailed):
            if second is None and len(first) <= _ONE_REQUEST:
                upload = functools.partial(blob.upload_from_string, first, checksum="crc32c")
                self._session.call(upload, lost, content_type=_BYTES, if_generation_match=expected)
                return str(blob.generation)
            if not expected and self._stat(key) is not None:
                return None  # before sending it for nothing
            chunks = itertools.chain(filter(None, (first, second)), chunks)
            return self._put_large(blob, chunks, expected, lost)
        return self._settle(key, attempt, expected, bool(lost))

    def _put_large(
        self, blob: Blob, chunks: Iterable[bytes], expected: int, lost: list[Exception]
    ) -> Token:
        session = self._session
        upload = session.call(
            blob.create_resumable_upload_session,
            content_type=_BYTES,
            if_generation_match=expected,
        )
        stored, checksum = upload_chunks(
            chunks, functools.partial(session.put_chunk, upload), session.retry(lost)
        )
        if stored["crc32c"] != checksum:
            session.call(blob.delete, if_generation_match=int(stored["generation"]))
            raise DamagedObject(
                f"{self.url}/{blob.name.removeprefix(self._prefix)}: cannot write: it arrived "
                "damaged and was removed; try again"
            )
        return stored["generation"]

    def _settle(self, key: str, attempt: str, expected: int, lost: bool) -> Token | None:
        """Return the generation if what stands in the way of an attempt is its own work."""
        found = self._stat(key)
        metadata = (found and found.metadata) or {}
        if metadata.get(_ATTEMPT) == attempt:
            return str(found.generation)
        if lost and metadata.get(_FOLLOWS) != str(expected):
            raise StorageError(
                f"{self.url}/{key}: the answer to a write was lost and the object changed since; "
                "nobody can say whether it was written; read it again"
            )
        return None  # what is there replaced the very state that we wanted to replace


def _is_key(name: str) -> bool:
    """Whether a listed name can be a key: people's tools leave ``folder/`` and dot files."""
    try:
        return bool(check_key(name))
    except StorageError:
        return False
