"""Pick the object store by the scheme of a location. The one place that knows which there are."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.contracts.errors import ConfigError
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore


def open_store(url: str) -> ObjectStore:
    """Return the store at ``url``: a folder's path, ``file:///folder`` or ``gs://bucket/path``.

    Raises:
        ConfigError: the scheme is not supported, the location is empty, or a package is missing.
        StorageError: nobody is signed in to Google Cloud.
    """
    scheme, separator, rest = url.partition("://")
    if not separator and url:
        return LocalStore(url)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc in ("", "localhost") and parts.path.strip("/"):
            return LocalStore(unquote(parts.path))
        raise ConfigError(f"{url}: no folder of this machine; give file:///path/to/folder")
    if scheme == "gs":
        try:  # only here: half a second, and a package that local runs do without
            from infra.storage.gcs_store import GcsStore
        except ImportError as e:
            raise ConfigError(
                f"{url}: a bucket needs google-cloud-storage ({e}); pip install 'headrace[gcs]' "
                "('headrace[gcp]' has it too)"
            ) from e
        bucket, _, prefix = rest.partition("/")
        return GcsStore(bucket, prefix)
    raise ConfigError(
        f"{url!r}: not a location of a run; give a local folder, file:///folder or gs://bucket/path"
    )


def local_folder(url: str) -> Path:
    """The folder of this machine that goes with a location: for logs, locks and unfinished files.

    A local run's own; for ``gs://bucket/path`` it is ``runs/bucket/path`` where the user stands.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    if scheme == "file":
        return Path(unquote(urlsplit(url).path))
    return Path("runs", *re.findall(r"[\w.~-]*\w[\w.~-]*", rest))
