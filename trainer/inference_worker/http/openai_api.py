"""OpenAI's pages: a body in, an answer or a stream of events out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infra.contracts.records import GenerateReply
from trainer.inference_worker.generation_job import Drawn
from trainer.inference_worker.http.http_backend import Backend
from trainer.inference_worker.http.http_call import Call
from trainer.inference_worker.http.http_limits import Refused
from trainer.inference_worker.http.openai_reply import Piece, Shape
from trainer.inference_worker.http.openai_request import OpenAIRequest
from trainer.inference_worker.http.openai_stream import TextStream


def models(model: str, created: int) -> dict[str, Any]:
    """What ``GET /v1/models`` answers."""
    entry = {"id": model, "object": "model", "created": created, "owned_by": "headrace"}
    return {"object": "list", "data": [entry]}


def submit(call: Call, request: OpenAIRequest, model: str) -> None:
    """Queue all groups of a request. Raises ``Refused``: another model is asked for."""
    if request.model not in ("", model):
        raise Refused(
            404,
            f"the model {request.model[:60]!r} is not here; this worker serves {model!r}",
            param="model",
            code="model_not_found",
        )
    for group, prompt_ids in request.groups:
        call.submit(group, prompt_ids=prompt_ids, stream=request.stream)


def stream(
    call: Call, request: OpenAIRequest, shape: Shape, backend: Backend
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer; the end mark is the server's."""
    n = request.groups[0][0].sampling.n
    choices = [
        _Choice(number * n + k, backend, request.cuts(group), offsets=request.logprobs)
        for number, (group, _) in enumerate(request.groups)
        for k in range(n)
    ]
    replies: dict[int, GenerateReply] = {}
    begun = not request.chat
    for news in call.events():
        if not begun:
            yield shape.chunk(
                [Piece(index=c.index, text="", tokens=()) for c in choices], first=True
            )
            begun = True
        grown = []
        for number, item in news:
            if isinstance(item, Drawn):
                choice = choices[number * n + item.index]
                choice.add(item)
                grown.append(choice)
                continue
            replies[number] = item
            for k, sample in enumerate(item.samples):
                choice = choices[number * n + k]
                choice.finish(sample.response_text, sample.finish_reason.value)
                grown.append(choice)
        # Whoever reads slowly gets several tokens at a time.
        for choice in dict.fromkeys(grown):
            if piece := choice.piece():
                yield shape.chunk([piece])
    if request.include_usage:
        yield shape.usage_chunk([replies[number] for number in range(len(request.groups))])


class _Choice:
    """One sample of a stream: tokens wait until their text may be sent."""

    def __init__(
        self, index: int, backend: Backend, stops: tuple[str, ...], *, offsets: bool
    ) -> None:
        self.index = index
        self._token_text = backend.tokenizer.token_text if offsets else None
        self._stream = TextStream(backend.tokenizer.decode, stops)
        self._waiting: list[Drawn] = []
        self._text, self._offset = "", 0
        self._finish: str | None = None

    def add(self, drawn: Drawn) -> None:
        self._waiting.append(drawn)
        self._text += self._stream.add(drawn.token)

    def finish(self, text: str, reason: str) -> None:
        self._text += self._stream.finish(text)
        self._finish = reason

    def piece(self) -> Piece | None:
        """What may be sent since the last time, if anything."""
        if not (self._text or self._finish):
            return None
        tokens, self._waiting = self._waiting, []
        text, self._text = self._text, ""
        piece = Piece(
            index=self.index, text=text, tokens=tokens, finish=self._finish, offset=self._offset
        )
        if self._token_text is not None:
            self._offset += sum(len(self._token_text(t.token)) for t in tokens)
        return piece
