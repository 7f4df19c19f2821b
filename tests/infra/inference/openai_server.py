"""A small real HTTP server that answers as vLLM does, one code point per token."""

from __future__ import annotations

import json

from infra.contracts.errors import InferenceError
from infra.contracts.records import Message, SamplingParams
from tests.contracts.inference_client_contract import make_request
from tests.infra.inference.worker_server import WorkerServer


class OpenAiServer(WorkerServer):
    """``leave_out`` names what it does not tell: ``token_ids``, ``logprobs``, ``prompt_token_ids``.

    What it samples is the fake client's; the sample's index is read from ``user``.
    """

    leave_out: tuple[str, ...] = ()

    def answer(self, page: str, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        with self.lock:
            self.bodies = [*getattr(self, "bodies", []), (page, asked)]
        chat = page == "/v1/chat/completions"
        prompt = asked.get("prompt")
        if chat:
            prompt = "\n".join(m["content"] for m in asked["messages"])
        elif isinstance(prompt, list):
            prompt = "".join(map(chr, prompt))
        index = int(asked["user"].rpartition("/")[2])
        sampling = SamplingParams(
            n=index + 1, max_new_tokens=asked["max_tokens"], stop=tuple(asked.get("stop", ()))
        )
        request = make_request(n=index + 1)
        request = type(request)(
            request_id=request.request_id,
            messages=(Message(role="user", content=prompt),),
            sampling=sampling,
            seeds=request.seeds,
            min_version=0,
            timeout_secs=1.0,
        )
        try:
            sample = self.fake.answer(request).samples[index]
        except InferenceError as e:
            return 400, json.dumps({"error": {"message": str(e)}}).encode()
        told = {"finish_reason": sample.finish_reason.value, "index": 0}
        lines = sample.behaviour_logprobs.tolist()
        if chat:
            told["message"] = {"role": "assistant", "content": sample.response_text}
            if "logprobs" not in self.leave_out and asked.get("logprobs"):
                told["logprobs"] = {"content": [{"token": "?", "logprob": x} for x in lines]}
        else:
            told["text"] = sample.response_text
            if "logprobs" not in self.leave_out and asked.get("logprobs") is not None:
                told["logprobs"] = {"token_logprobs": lines}
        answer = {"model": asked["model"], "choices": [told]}
        if asked.get("return_token_ids"):
            told["token_ids"] = sample.response_ids.tolist()
            (answer if chat else told)["prompt_token_ids"] = [ord(c) for c in prompt]
        for name in self.leave_out:
            told.pop(name, None)
            answer.pop(name, None)
        return 200, json.dumps(answer).encode()
