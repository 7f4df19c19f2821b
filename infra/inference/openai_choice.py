"""The answer to one sample, as vLLM and SGLang send it: ``/completions`` or ``/chat/completions``.

Token ids are ``token_ids`` of the choice; those of the prompt ``prompt_token_ids`` of the choice
(completions) or of the whole (chat). Log-probs of the sampled tokens are ``token_logprobs``, or
``logprob`` of each item of ``content``. Our own worker's ``loss_mask`` says what it forced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.inference.worker import Failed

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What one sample's answer says; None where it says nothing."""

    text: str
    finish_reason: str
    token_ids: np.ndarray | None
    """int32[T]"""
    prompt_ids: np.ndarray | None
    """int32[P]"""
    logprobs: np.ndarray | None
    """float32[T]"""
    loss_mask: np.ndarray | None = None
    """bool[T]"""


def parse_choice(data: bytes) -> Choice:
    """Parse an answer with one choice. Raises ``Failed`` for one that cannot be what it seems."""
    try:
        body = json.loads(data)
        (choice,) = body["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found = Choice(
            text=text or "",
            finish_reason=choice["finish_reason"],
            token_ids=_ids(choice.get("token_ids")),
            prompt_ids=_ids(choice.get("prompt_token_ids") or body.get("prompt_token_ids")),
            logprobs=_logprobs(choice.get("logprobs")),
            loss_mask=_flags(choice.get("loss_mask")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        raise Failed("the reply cannot be read") from e
    if not isinstance(found.text, str) or found.finish_reason not in FINISH_REASONS:
        raise Failed(f"a reply that ended with '{str(found.finish_reason)[:50]}'")
    if found.token_ids is not None and found.logprobs is not None:
        tokens, logprobs = len(found.token_ids), len(found.logprobs)
        if tokens != logprobs:
            raise Failed(f"{logprobs} log-probs for {tokens} token ids")
    return found


def _ids(values: Any) -> np.ndarray | None:
    if values is None:
        return None
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("token ids must be whole numbers")
    return np.array(values, np.int32)


def _flags(values: Any) -> np.ndarray | None:
    if values is None:
        return None
    if not all(type(value) is bool for value in values):
        raise ValueError("a loss mask must be true or false")
    return np.array(values, bool)


def _logprobs(told: Any) -> np.ndarray | None:
    if told is None:
        return None
    values = told.get("token_logprobs")
    if values is None and told.get("content") is not None:
        values = [item["logprob"] for item in told["content"]]
    return None if values is None else np.array(values, np.float32)
