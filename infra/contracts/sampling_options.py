"""Sampling options that have no column of a shard, as one JSON text per row.

Only what is not at its default is written, so most rollouts say ``{}``::

    {"banned_token_ids":[7],"min_p":0.05}
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from infra.contracts.errors import SchemaMismatch
from infra.contracts.json_codec import from_json
from infra.contracts.sampling_params import SamplingParams

SAMPLING_COLUMNS = ("n", "max_new_tokens", "temperature", "top_p", "top_k", "stop")
"""Options with a column of their own, ``sampling_`` before the name."""
_DEFAULTS = SamplingParams()
_NAMES = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in SAMPLING_COLUMNS]


def options_text(sampling: SamplingParams) -> str:
    """What the columns do not say."""
    said = {name: getattr(sampling, name) for name in _NAMES}
    said = {name: value for name, value in said.items() if value != getattr(_DEFAULTS, name)}
    return json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sampling_of(columns: dict[str, Any], options: str) -> SamplingParams:
    """The record again. Raises ``SchemaMismatch``: a value is not allowed."""
    said = json.loads(options)
    if not isinstance(said, dict) or not said.keys() <= set(_NAMES):
        raise SchemaMismatch(
            f"sampling_options: {options[:80]!r} is not an object of known options"
        )
    return from_json(SamplingParams, json.dumps(columns | said))
