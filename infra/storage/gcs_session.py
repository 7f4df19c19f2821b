"""Requests to one bucket of Google Cloud Storage: signing in, retries, errors in one line.

This file and ``gcs_store`` are the only ones that import Google's packages; ``open_store`` imports
them when it meets ``gs://``.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import google.auth
import requests
import urllib3
from google.api_core.exceptions import GoogleAPIError, NotFound, RetryError, from_http_response
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.resumable_upload import ChunkIncomplete

# The library would ask for the bucket's metadata behind our back, for traces that nobody reads and
# with a permission (storage.buckets.get) that we do not need: a denial in the audit log.
os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")

_T = TypeVar("_T")
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_CONNECTIONS = 64
"""Kept open for threads that read at once; each beyond that opens one per request."""
TIMEOUT = (10.0, 60.0)
"""Seconds one request may take to connect, and be silent while it answers."""
_LONGEST_WAIT_SECS = 16.0
_TOO_MANY = 429
_PASSING_CODES = {408, _TOO_MANY, 500, 502, 503, 504}
_PASSING = (
    ConnectionError,
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    TransportError,
    DataCorruption,
    ChunkIncomplete,
)
_ERRORS = (*_PASSING, GoogleAPIError, GoogleAuthError, InvalidResponse, requests.RequestException)
_SIGN_IN = "run 'gcloud auth application-default login' or set GOOGLE_APPLICATION_CREDENTIALS"
_REMEDIES = {
    400: "check the bucket's name and the path",
    401: _SIGN_IN,
    403: "grant this account roles/storage.objectUser on the bucket",
    404: "create the bucket or correct its name",
    _TOO_MANY: "write less often (one object takes about one write a second) or raise the quota",
}
_UNREACHABLE = "check the network and the service's status, then start again"


class GcsSession:
    """A signed-in client for one bucket; safe from several threads, not across a fork."""

    def __init__(
        self, bucket: str, url: str, *, endpoint: str, deadline_secs: float, first_wait_secs: float
    ) -> None:
        self._url = url
        self._deadline_secs, self._first_wait_secs = deadline_secs, first_wait_secs
        endpoint = endpoint or os.environ.get("STORAGE_EMULATOR_HOST", "")
        if endpoint and "://" not in endpoint:
            endpoint = f"http://{endpoint}"
        with self.naming("", "open"):
            credentials = (
                AnonymousCredentials() if endpoint else google.auth.default(scopes=[_SCOPE])[0]
            )
        self._http = AuthorizedSession(credentials)
        for scheme in ("https://", "http://"):
            self._http.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS))
        self.bucket = storage.Client(
            project=None,
            credentials=credentials,
            client_options={"api_endpoint": endpoint} if endpoint else None,
            _http=self._http,
        ).bucket(bucket)
        self._bucket_seen = False

    def call(
        self, call: Callable[..., _T], lost: list[Exception] | None = None, **arguments: object
    ) -> _T:
        """Make a call of the library; see ``retry``."""
        request = functools.partial(call, retry=None, timeout=TIMEOUT, **arguments)
        result = self.retry(lost)(request)()
        self._bucket_seen = True
        return result

    def retry(self, lost: list[Exception] | None = None) -> Retry:
        """Try again after errors that may pass, until the deadline.

        Each error after which the server may have done its work all the same goes to ``lost``.
        """

        def note(e: Exception) -> None:
            if lost is not None and getattr(e, "code", None) != _TOO_MANY:
                lost.append(e)

        return Retry(
            predicate=lambda e: (
                isinstance(e, _PASSING) or getattr(e, "code", None) in _PASSING_CODES
            ),
            initial=self._first_wait_secs,
            maximum=_LONGEST_WAIT_SECS,
            timeout=self._deadline_secs,
            on_error=note,
        )

    def put_chunk(self, upload: str, body: bytes, headers: dict[str, str]) -> requests.Response:
        """Send one request of the resumable upload at the address ``upload``."""
        answer = self._http.put(upload, data=body, headers=headers, timeout=TIMEOUT)
        if answer.status_code not in (200, 201, 308):
            raise from_http_response(answer)
        return answer

    def require_bucket(self, absent: NotFound) -> None:
        """Raise ``absent`` again if it is the bucket, not the object, that is missing.

        The words of the answer tell; until a call succeeds, a listing.
        """
        if "bucket does not exist" in str(absent):
            raise absent
        if not self._bucket_seen:
            self.call(self._list_one)

    def _list_one(self, **arguments: object) -> list[storage.Blob]:
        return list(self.bucket.list_blobs(max_results=1, fields="items/name", **arguments))

    @contextlib.contextmanager
    def naming(self, key: str, verb: str) -> Iterator[None]:
        """Turn Google's errors into ``StorageError`` that names the object and the way out."""
        try:
            yield
        except _ERRORS as e:
            name = f"{self._url}/{key}".removesuffix("/")
            cause = (isinstance(e, RetryError) and e.cause) or e
            if isinstance(cause, DataCorruption):
                raise DamagedObject(
                    f"{name}: cannot {verb}: what arrives does not match its crc32c; "
                    "check the network, or restore the object from a copy"
                ) from e
            code = getattr(cause, "code", None)
            way_out = _REMEDIES.get(code, _UNREACHABLE)
            if isinstance(cause, GoogleAuthError) and not isinstance(cause, TransportError):
                way_out = _SIGN_IN
            what = f"{code} {_said(cause)}" if code else _said(cause)
            raise StorageError(f"{name}: cannot {verb}: {what}; {way_out}") from e


def _said(e: Exception) -> str:
    """What the server said, or else the error, in one short line."""
    words = getattr(e, "message", None) or str(e) or type(e).__name__
    answer = getattr(e, "response", None)
    if answer is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # not JSON, or another form
            words = answer.json()["error"]["message"]
    line = " ".join(words.split())
    return line if len(line) <= 200 else f"{line[:200]}..."
