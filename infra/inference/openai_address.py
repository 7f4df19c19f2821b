"""Addresses of engines that speak the OpenAI protocol, and what they say about the engine.

``openai+http://host:port/v1?model=NAME`` with, after ``&``:

* ``version=N``: the engine serves version N of this run's policy, and no other;
* ``logprobs=sampled|model|none``: of which distribution its log-probs are (``capabilities``);
* ``ids=no``: it does not return token ids and refuses to be asked for them;
* ``options=no``: it refuses what OpenAI's API lacks (``top_k``, ``min_p``, ...);
* ``thinking=yes``: it is a headrace worker: takes a budget for thinking, marks what it forced;
* ``tokenizer=FOLDER``: prompts are sent as token ids, made with this tokenizer and template.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from infra.contracts.errors import ConfigError
from infra.inference.capabilities import Capabilities, LogprobMeaning, VersionMeaning

SCHEMES = {"openai+http": False, "openai+https": True}
_FORM = "give openai+http://host:port/v1?model=NAME"
_KEYS = ("model", "version", "logprobs", "ids", "options", "thinking", "tokenizer")
_LOGPROBS = [meaning.value for meaning in LogprobMeaning if meaning is not LogprobMeaning.BOTH]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiAddress:
    """A parsed address."""

    host: str
    port: int
    secure: bool
    path: str
    """Before ``/completions``, e.g. ``/v1``."""
    model: str
    version: int | None = None
    tokenizer: str = ""
    capabilities: Capabilities


def parse_address(url: str) -> OpenAiAddress:
    """Parse an address. Raises ``ConfigError`` that says what is allowed."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    secure = SCHEMES.get(parts.scheme)
    if secure is None or not parts.hostname or not (port or secure):
        raise ConfigError(f"endpoint '{url}': {_FORM}")
    said = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = [key for key in said if key not in _KEYS]
    if unknown:
        raise ConfigError(f"endpoint '{url}': unknown '{unknown[0]}'; allowed: {', '.join(_KEYS)}")
    version, logprobs = said.get("version"), said.get("logprobs", "model")
    checks = (
        (said.get("model"), f"model is missing; {_FORM}"),
        (version is None or (version.isascii() and version.isdigit()), "version must be 0, 1, ..."),
        (logprobs in _LOGPROBS, f"logprobs must be one of {', '.join(_LOGPROBS)}"),
        *(
            (said.get(key, "yes") in ("yes", "no"), f"{key} must be yes or no")
            for key in ("ids", "options", "thinking")
        ),
    )
    for ok, problem in checks:
        if not ok:
            raise ConfigError(f"endpoint '{url}': {problem}")
    return OpenAiAddress(
        host=parts.hostname,
        port=port or 443,
        secure=secure,
        path=parts.path.rstrip("/"),
        model=said["model"],
        version=None if version is None else int(version),
        tokenizer=said.get("tokenizer", ""),
        capabilities=Capabilities(
            token_ids=said.get("ids") != "no",
            logprobs=LogprobMeaning(logprobs),
            versions=VersionMeaning.NONE if version is None else VersionMeaning.PINNED,
            options=said.get("options") != "no",
            thinking=said.get("thinking") == "yes",
        ),
    )
