"""Pick the object store by the scheme of a location. The one place that knows which there are."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from infra.contracts.errors import ConfigError
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore


def open_store(url: str) -> ObjectStore:
    """Return the store at ``url``: a folder's path, or ``file:///folder``.

    Raises:
        ConfigError: the scheme is not supported, or the location is empty.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if not scheme and url:
        return LocalStore(url)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc in ("", "localhost") and parts.path.strip("/"):
            return LocalStore(unquote(parts.path))
        raise ConfigError(f"{url}: no folder of this machine; give file:///path/to/folder")
    if scheme == "gs":
        raise ConfigError(f"{url}: runs in a bucket are not supported yet; give a local folder")
    raise ConfigError(f"{url!r}: not a location of a run; give a local folder or file:///folder")
