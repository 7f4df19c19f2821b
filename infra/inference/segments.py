"""Responses that come in segments: what to ask next, and the whole put together.

A segment is what a worker answers of a response it did not end: ``finish_reason`` is ``segment``.
The next request is for the unended samples alone, each with its seed and its tokens so far, under
the id of the first with ``/2``, ``/3``, ... behind it. Draws depend on seed and position, so under
one version the joined response is the one that a single request would have brought.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from infra.contracts.errors import InferenceError
from infra.contracts.records import FinishReason, GenerateReply, GenerateRequest, Sample
from infra.inference.reply_checks import PER_TOKEN, loss_mask_of

SEGMENT_MARK = "/"
"""Between a request's id and the number of a later segment."""
SAME = ("engine", "dtype", "tokenizer_digest")
"""What all segments of a response must agree in."""


class Segments:
    """One request's answer as it grows.

    Args:
        request: the whole; its ``so_far`` is empty.
        segment_tokens: most new tokens per sample and request.
    """

    def __init__(self, request: GenerateRequest, segment_tokens: int) -> None:
        self._request, self._segment_tokens = request, segment_tokens
        self._parts: list[list[Sample]] = [[] for _ in range(request.sampling.n)]
        self._open = list(range(request.sampling.n))
        self._first: GenerateReply | None = None
        self._weights: dict[int, str] = {}
        self._number = 1

    @property
    def done(self) -> bool:
        return not self._open

    def next_request(self) -> GenerateRequest:
        """Ask for what is missing."""
        whole, later = self._request, self._number > 1
        return dataclasses.replace(
            whole,
            request_id=whole.request_id + (f"{SEGMENT_MARK}{self._number}" if later else ""),
            sampling=dataclasses.replace(whole.sampling, n=len(self._open)),
            seeds=tuple(whole.seeds[i] for i in self._open),
            segment_tokens=self._segment_tokens,
            so_far=tuple(tuple(self._ids(i)) for i in self._open) if later else (),
        )

    def add(self, reply: GenerateReply) -> None:
        """Take the answer to ``next_request``.

        Raises:
            InferenceError: it does not continue what is there. Nothing of it was taken.
        """
        self._check(reply)
        self._first = self._first or reply
        self._weights |= dict(reply.weights)
        for index, sample in zip(self._open, reply.samples, strict=True):
            self._parts[index].append(sample)
        self._open = [
            i for i in self._open if self._parts[i][-1].finish_reason is FinishReason.SEGMENT
        ]
        self._number += 1

    def reply(self) -> GenerateReply:
        """The whole answer; the segments must be ``done``."""
        return dataclasses.replace(
            self._first,
            request_id=self._request.request_id,
            samples=tuple(map(_joined, self._parts)),
            weights=tuple(sorted(self._weights.items())),
        )

    def _ids(self, index: int) -> list[int]:
        return [int(i) for part in self._parts[index] for i in part.response_ids]

    def _check(self, reply: GenerateReply) -> None:
        first = self._first or reply
        other = [name for name in SAME if getattr(reply, name) != getattr(first, name)]
        if not np.array_equal(reply.prompt_ids, first.prompt_ids):
            other.append("prompt_ids")
        known = self._weights
        other += [f"version {v}" for v, digest in reply.weights if known.get(v, digest) != digest]
        if other:
            raise InferenceError(
                f"a segment does not continue the one before: {', '.join(other)} differ; give all "
                "workers of an endpoint the same [model] and [inference]"
            )
        if not any(len(sample.response_ids) for sample in reply.samples):
            raise InferenceError("a segment without a token")


def _joined(parts: list[Sample]) -> Sample:
    if len(parts) == 1:
        return parts[0]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_TOKEN}
    if any(part.loss_mask is not None for part in parts):
        columns["loss_mask"] = np.concatenate([loss_mask_of(part) for part in parts])
    return dataclasses.replace(parts[-1], **columns)
