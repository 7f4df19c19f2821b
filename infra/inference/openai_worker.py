"""An engine behind the OpenAI protocol: vLLM, SGLang, tpu-inference, or a hosted one.

Every sample is a request of its own, because the protocol has one seed per request and a sample's
seed must not depend on its group; engines share the prompt's prefix among them. A sample is
``user = request id/index`` in the engine's logs. A closed connection is how it hears of a
cancellation. What the reply lacks decides what the rollouts are good for: everything (token ids,
log-probs whose meaning is known, a version), or text alone. Never half.
"""

from __future__ import annotations

import json
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from infra.contracts.errors import InferenceError
from infra.contracts.records import FinishReason, GenerateReply, GenerateRequest, Sample
from infra.contracts.sampling_params import MAX_BIAS, SamplingParams
from infra.inference.capabilities import LogprobMeaning, unsupported, untrainable
from infra.inference.http_connections import HttpConnections
from infra.inference.native_worker import GRACE_SECS, PROBE_SECS, raise_for_status
from infra.inference.openai_address import OpenAiAddress
from infra.inference.openai_choice import Choice, parse_choice
from infra.inference.worker import Call, Failed, Unreachable
from infra.text.tokenizer import Tokenizer


class OpenAiWorker:
    """See ``infra.inference.worker.Worker``.

    Args:
        address: Where, and what its operator says about it.
        tokenizer: Sends prompts as ids; None: as text or messages, for the engine to encode.
        trainable: Refuse (not retryable) what could not be trained on, instead of text alone.
        key: Sent as bearer token, if not empty.
        threads: Samples under way at a time.
        patience_secs: After so long without an answer the engine is asked whether it lives.
    """

    def __init__(
        self,
        address: OpenAiAddress,
        *,
        tokenizer: Tokenizer | None = None,
        trainable: bool = False,
        key: str = "",
        threads: int = 256,
        patience_secs: float = 10.0,
    ) -> None:
        self.name = f"engine {address.host}:{address.port}"
        self.capabilities = address.capabilities
        self._address, self._tokenizer, self._trainable = address, tokenizer, trainable
        self._http = HttpConnections(
            address.host,
            address.port,
            secure=address.secure,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            patience_secs=patience_secs,
        )
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sample")

    def attempt(self, request: GenerateRequest, call: Call) -> GenerateReply:
        version = self._address.version
        if version is not None and version < request.min_version:
            raise InferenceError(
                f"{self.name}: serves version {version}, as its address says; version "
                f"{request.min_version} is needed",
                retryable=False,
            )
        lacks = unsupported(self.capabilities, request.sampling)
        if lacks:
            raise InferenceError(f"{self.name}: cannot sample so: {lacks}", retryable=False)
        reason = untrainable(self.capabilities, request.sampling)
        if reason and self._trainable:
            raise self._refusal(reason)
        prompt = self._encode(request)
        calls = [Call() for _ in request.seeds]
        call.on_cancel(lambda: _cancel(calls))
        samples = [
            self._pool.submit(self._sample, request, i, prompt, own) for i, own in enumerate(calls)
        ]
        done, _ = wait(samples, return_when=FIRST_EXCEPTION)
        _cancel(calls)
        call.off()
        for future in samples:
            future.cancel()
        for future in done:
            future.result()
        return self._reply(request, prompt, [future.result() for future in samples], reason)

    def probe(self, timeout_secs: float) -> None:
        answer = self._http.get(f"{self._address.path}/models", timeout_secs)
        if answer.status != 200:
            raise Unreachable(f"status {answer.status}")

    def close(self) -> None:
        self._http.close()

    def _encode(self, request: GenerateRequest) -> np.ndarray | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.encode_prompt(request.messages)
        except ValueError as e:
            raise InferenceError(f"{self.name}: {e}", retryable=False) from e

    def _sample(
        self, request: GenerateRequest, index: int, prompt: np.ndarray | None, call: Call
    ) -> Choice:
        page, body = self._body(request, index, prompt)
        answer = self._http.post(
            self._address.path + page,
            json.dumps(body).encode(),
            request.timeout_secs + GRACE_SECS,
            call,
            lambda: self.probe(PROBE_SECS),
        )
        raise_for_status(self.name, answer)
        return parse_choice(answer.body)

    def _body(
        self, request: GenerateRequest, index: int, prompt: np.ndarray | None
    ) -> tuple[str, dict[str, Any]]:
        """Page and body for one sample. Only what is asked for is named: hosts refuse extras."""
        sampling, first = request.sampling, request.messages[0]
        body: dict[str, Any] = {
            "model": self._address.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seeds[index],
            "user": f"{request.request_id}/{index}",
        }
        body |= _options(sampling)
        if self.capabilities.token_ids:
            body["return_token_ids"] = True
        if sampling.stop:
            body["stop"] = list(sampling.stop)
            if self.capabilities.token_ids:
                # The string stays in the text, as it is in the ids: vLLM's name and SGLang's.
                body |= {"include_stop_str_in_output": True, "no_stop_trim": True}
        logprobs = self.capabilities.logprobs is not LogprobMeaning.NONE
        if prompt is None and first.role != "text":
            body["messages"] = [{"role": m.role, "content": m.content} for m in request.messages]
            return "/chat/completions", body | (
                {"logprobs": True, "top_logprobs": 0} if logprobs else {}
            )
        body["prompt"] = first.content if prompt is None else prompt.tolist()
        return "/completions", body | ({"logprobs": 1} if logprobs else {})

    def _reply(
        self,
        request: GenerateRequest,
        prompt: np.ndarray | None,
        choices: list[Choice],
        reason: str,
    ) -> GenerateReply:
        prompts = [c.prompt_ids for c in choices if c.prompt_ids is not None]
        if prompt is not None:
            prompts.append(prompt)
        if any(not np.array_equal(prompts[0], other) for other in prompts):
            raise Failed("token ids of the prompt differ between samples, or from those sent")
        if not reason and not all(c.token_ids is not None for c in choices):
            reason = "it returned no token ids"
        if not reason and not prompts:
            reason = "it returned no token ids of the prompt"
        if not reason and not all(c.logprobs is not None for c in choices):
            reason = "it returned no log-probs"
        if request.sampling.max_thinking_tokens and any(c.loss_mask is None for c in choices):
            reason = reason or "it does not say which tokens it forced"
        if reason and self._trainable:
            raise self._refusal(reason)
        version = self._address.version
        return GenerateReply(
            request_id=request.request_id,
            prompt_ids=None if reason else prompts[0],
            samples=tuple(_sample_of(choice, None if reason else version) for choice in choices),
            weights=() if version is None else ((version, f"unverified:{self._address.model}"),),
            engine=f"openai:{self._address.model}",
            dtype="",
            tokenizer_digest=self._tokenizer.digest if self._tokenizer else "",
        )

    def _refusal(self, reason: str) -> InferenceError:
        return InferenceError(
            f"{self.name}: its rollouts cannot be trained on: {reason}", retryable=False
        )


def _options(sampling: SamplingParams) -> dict[str, Any]:
    """What is asked for beyond temperature and top-p, under vLLM's names (SGLang knows most)."""
    bans = {str(token): -MAX_BIAS for token in sampling.banned_token_ids}
    options = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": bans | {str(token): bias for token, bias in sampling.logit_bias},
        "thinking_token_budget": sampling.max_thinking_tokens,
    }
    if sampling.max_thinking_tokens:
        options["thinking_marks"] = list(sampling.thinking_marks)
    return {name: value for name, value in options.items() if value}


def _cancel(calls: list[Call]) -> None:
    for call in calls:
        call.cancel()


def _sample_of(choice: Choice, version: int | None) -> Sample:
    """Text alone without a version. One column serves as both log-probs: ``untrainable`` says
    where that is so."""
    whole = version is not None
    tokens = len(choice.token_ids) if whole else 0
    return Sample(
        response_ids=choice.token_ids if whole else None,
        response_text=choice.text,
        behaviour_logprobs=choice.logprobs if whole else None,
        raw_logprobs=choice.logprobs if whole else None,
        policy_versions=np.full(tokens, version, np.int32) if whole else None,
        finish_reason=FinishReason(choice.finish_reason),
        loss_mask=choice.loss_mask if whole else None,
    )
