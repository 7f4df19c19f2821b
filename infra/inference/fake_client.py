"""An inference client that answers at once and can be predicted by hand.

Sample i of a request is ``responses[i % len(responses)]``, one token per character (the token id
is the code point), every log-prob -0.5, all by version ``max(version, request.min_version)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from infra.contracts.errors import InferenceError
from infra.contracts.records import FinishReason, GenerateReply, GenerateRequest, Sample
from infra.inference.capabilities import NATIVE

LOGPROB = -0.5
LONGEST_GROUP = 64


class FakeInferenceClient:
    """Deterministic; see the module's docstring.

    Args:
        responses: The responses of a group, in sample order, repeated as needed.
        respond: Instead of ``responses``: request and sample index to text. It may raise
            ``InferenceError``, which becomes the future's error.
        version: The policy version it pretends to serve.
    """

    capabilities = NATIVE

    def __init__(
        self,
        responses: Sequence[str] = ("0\n", "1\n"),
        *,
        respond: Callable[[GenerateRequest, int], str] | None = None,
        version: int = 0,
    ) -> None:
        self._respond = respond or (lambda request, i: responses[i % len(responses)])
        self.version = version
        self.requests: list[GenerateRequest] = []
        self._closed = False

    def submit(self, request: GenerateRequest) -> Future[GenerateReply]:
        """Answer at once: the future is done."""
        if self._closed:
            raise InferenceError("the client is closed", retryable=False)
        future: Future[GenerateReply] = Future()
        try:
            future.set_result(self.answer(request))
        except InferenceError as e:
            future.set_exception(e)
        return future

    def counters(self) -> dict[str, float]:
        """Nothing worth counting."""
        return {}

    def close(self) -> None:
        self._closed = True

    def answer(self, request: GenerateRequest) -> GenerateReply:
        """The reply to a request. Raises ``InferenceError`` where ``respond`` does."""
        self.requests.append(request)
        if len(request.seeds) != request.sampling.n:
            raise InferenceError("seeds and n differ", retryable=False)
        version = self.version = max(self.version, request.min_version)
        text = "\n".join(message.content for message in request.messages)
        return GenerateReply(
            request_id=request.request_id,
            prompt_ids=_token_ids(text),
            samples=tuple(self._sample(request, i, version) for i in range(request.sampling.n)),
            weights=((version, f"fake-{version}"),),
            engine="fake-1",
            dtype="float32",
            tokenizer_digest="code-points",
        )

    def _sample(self, request: GenerateRequest, index: int, version: int) -> Sample:
        before = "".join(map(chr, request.so_far[index])) if request.so_far else ""
        text, reason = self._response(request, index, before), FinishReason.STOP
        ends = [text.find(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        text = text[: min(ends)] if ends else text
        if len(text) > request.sampling.max_new_tokens:
            text, reason = text[: request.sampling.max_new_tokens], FinishReason.LENGTH
        ends_at = len(before) + (request.segment_tokens or len(text))
        if ends_at < len(text):
            text, reason = text[:ends_at], FinishReason.SEGMENT
        new = text[len(before) :]
        logprobs = np.full(len(new), LOGPROB, np.float32)
        return Sample(
            response_ids=_token_ids(new),
            response_text=text,
            behaviour_logprobs=logprobs,
            raw_logprobs=logprobs,
            policy_versions=np.full(len(new), version, np.int32),
            finish_reason=reason,
        )

    def _response(self, request: GenerateRequest, index: int, before: str) -> str:
        """Later segments ask for some of the samples: from ``index`` on, the one that fits."""
        texts = (self._respond(request, i) for i in range(index, index + LONGEST_GROUP))
        return next(text for text in texts if text.startswith(before))


def _token_ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)
