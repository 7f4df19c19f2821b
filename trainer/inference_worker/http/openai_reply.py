"""Answers in OpenAI's shape, whole or in chunks.

Log-probs are those of the distribution really sampled from: after bans, biases, temperature and
truncation. With ``return_token_ids`` each choice also has ``token_ids``, ``policy_versions``,
``raw_logprobs`` (temperature only) and ``loss_mask`` (false: forced): what a trainer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.contracts.records import GenerateReply, Sample
from trainer.inference_worker.generation_job import Drawn
from trainer.inference_worker.http.openai_request import OpenAIRequest
from trainer.inference_worker.http.openai_stream import cut

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of one choice: in a stream the newest, else all of it."""

    index: int
    text: str
    tokens: Sequence[Drawn]
    finish: str | None = None
    offset: int = 0
    """Characters of the tokens before, as ``text_offset`` counts them."""


class Shape:
    """One request's choices, chunks and final answer."""

    def __init__(
        self, request: OpenAIRequest, *, token_text: Callable[[int], str], model: str, created: int
    ) -> None:
        self._request, self._token_text = request, token_text
        self._head = {"id": request.request_id, "created": created, "model": model}

    def chunk(self, pieces: Iterable[Piece], *, first: bool = False) -> Json:
        """One event of a stream; ``first``: it only says who speaks."""
        chat = self._request.chat
        name = "chat.completion.chunk" if chat else "text_completion"
        choices = []
        for piece in pieces:
            choice = self._choice(piece)
            if chat:
                delta: Json = {"content": piece.text} if piece.text else {}
                choice["delta"] = {"role": "assistant", "content": ""} if first else delta
            else:
                choice["text"] = piece.text
            choices.append(choice)
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "object": name, "choices": choices, **usage}

    def usage_chunk(self, replies: Sequence[GenerateReply]) -> Json:
        """The last event, if it was asked for."""
        return {**self.chunk(()), "usage": _usage(replies), "system_fingerprint": _print(replies)}

    def answer(self, replies: Sequence[GenerateReply]) -> Json:
        """The whole answer."""
        request = self._request
        choices = []
        for (group, _), reply in zip(request.groups, replies, strict=True):
            for sample in reply.samples:
                piece = Piece(
                    index=len(choices),
                    text=cut(sample.response_text, request.cuts(group)),
                    tokens=drawn(sample),
                    finish=sample.finish_reason.value,
                )
                choice = self._choice(piece)
                if request.chat:
                    choice["message"] = {"role": "assistant", "content": piece.text}
                else:
                    choice["text"] = piece.text
                    if request.return_token_ids:
                        choice["prompt_token_ids"] = reply.prompt_ids.tolist()
                choices.append(choice)
        answer = {
            **self._head,
            "object": "chat.completion" if request.chat else "text_completion",
            "choices": choices,
            "usage": _usage(replies),
            "system_fingerprint": _print(replies),
        }
        if request.chat and request.return_token_ids:
            answer["prompt_token_ids"] = replies[0].prompt_ids.tolist()
        return answer

    def _choice(self, piece: Piece) -> Json:
        request, tokens = self._request, piece.tokens
        logprobs = None
        if request.logprobs and tokens:
            texts = [self._token_text(t.token) for t in tokens]
            logprobs = _chat_logprobs(texts, tokens) if request.chat else _logprobs(texts, piece)
        choice: Json = {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish}
        if request.return_token_ids:
            choice["token_ids"] = [t.token for t in tokens]
            choice["policy_versions"] = [t.version for t in tokens]
            choice["raw_logprobs"] = [t.raw for t in tokens]
            choice["loss_mask"] = [t.sampled for t in tokens]
        return choice


def drawn(sample: Sample) -> list[Drawn]:
    """A finished sample's tokens, as they were told when they were drawn."""
    sampled = sample.loss_mask
    columns = (
        sample.response_ids,
        sample.behaviour_logprobs,
        sample.raw_logprobs,
        sample.policy_versions,
        np.ones(len(sample.response_ids), bool) if sampled is None else sampled,
    )
    return [Drawn(0, *row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def _logprobs(texts: Sequence[str], piece: Piece) -> Json:
    offsets, at = [], piece.offset
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [t.behaviour for t in piece.tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _chat_logprobs(texts: Sequence[str], tokens: Sequence[Drawn]) -> Json:
    def bytes_of(text: str) -> list[int] | None:
        return None if "\ufffd" in text else list(text.encode())  # part of a character

    content = [
        {"token": text, "logprob": t.behaviour, "bytes": bytes_of(text), "top_logprobs": []}
        for text, t in zip(texts, tokens, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(replies: Sequence[GenerateReply]) -> Json:
    prompt = sum(len(reply.prompt_ids) for reply in replies)
    completion = sum(len(s.response_ids) for reply in replies for s in reply.samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _print(replies: Sequence[GenerateReply]) -> str:
    """The newest policy version that took part, and its manifest's digest."""
    version, digest = max(pair for reply in replies for pair in reply.weights)
    return f"v{version}-{digest[:12]}"
