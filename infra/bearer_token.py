"""Bearer tokens: a file's line or an environment variable, alike for who asks and who serves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from infra.contracts.errors import ConfigError

WORKER = "HEADRACE_WORKER_TOKEN"
"""Shown to, and asked for by, inference workers."""
WEIGHTS = "HEADRACE_WEIGHTS_TOKEN"
"""Of weight servers."""


def read_token(variable: str, file: str = "", environment: Mapping[str, str] | None = None) -> str:
    """The file's line, else what the variable holds, else none (``""``).

    Raises:
        ConfigError: the file cannot be read or is empty, or the token is no printable ASCII word.
    """
    token = (os.environ if environment is None else environment).get(variable, "")
    if file:
        try:
            token = Path(file).read_text(errors="replace").strip()
        except OSError as e:
            raise ConfigError(f"{file}: cannot be read: {e.strerror}") from e
        if not token:
            raise ConfigError(f"{file}: the token file is empty; write one line into it")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{file or variable}: a token is printable ASCII on one line, without spaces"
        )
    return token
