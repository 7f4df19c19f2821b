"""The bodies of ``/v1/completions`` and ``/v1/chat/completions``, checked and made ours.

What this worker does not do is refused by its name, never ignored. Beyond OpenAI's members there
are, under vLLM's names, ``top_k``, ``min_p``, ``min_tokens``, ``stop_token_ids``, ``ignore_eos``,
``include_stop_str_in_output`` (SGLang's ``no_stop_trim`` too), ``thinking_token_budget`` and
``return_token_ids``; and ours: ``banned_token_ids``, ``thinking_marks``, ``min_version`` and
``timeout_secs``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.contracts.ids import sample_seed
from infra.contracts.records import GenerateRequest, Message, SamplingParams
from trainer.inference_worker.http.http_checks import MAX_SAMPLES, is_unicode, wrong_values
from trainer.inference_worker.http.http_limits import Refused
from trainer.inference_worker.http.openai_fields import Fields, named, wrong

ROLES = ("system", "user", "assistant", "tool")
COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat's answer may fill the context."""
MOST = 2**31 - 1

Prompt = tuple[Message, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """One body: several prompts, each a group of ``n``."""

    request_id: str
    """Also the answer's id."""
    chat: bool
    model: str
    groups: tuple[tuple[GenerateRequest, np.ndarray | None], ...]
    """Token ids where the prompt was given so."""
    logprobs: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    keep_stop: bool
    """A stop string stays in the text, with all of the token that completed it."""

    def cuts(self, group: GenerateRequest) -> tuple[str, ...]:
        """Before which strings the text ends."""
        return () if self.keep_stop else group.sampling.stop


def parse_openai(
    body: bytes, *, chat: bool, vocab: int, request_secs: float, entropy: random.Random
) -> OpenAIRequest:
    """Read a body.

    Args:
        body: JSON.
        chat: which of the two pages.
        vocab: token ids of a prompt are below it.
        request_secs: deadline where the body names none.
        entropy: makes ids, and seeds where the body names none.

    Raises:
        Refused: 400, with what is wrong.
    """
    fields = Fields.of(body)
    request_id = f"{'chatcmpl' if chat else 'cmpl'}-{entropy.getrandbits(128):032x}"
    prompts = [_messages(fields.any("messages"))] if chat else _prompts(fields.any("prompt"), vocab)
    sampling = _sampling(fields, chat)
    if sampling.n * len(prompts) > MAX_SAMPLES:
        text = f"{len(prompts)} prompts with n = {sampling.n}; at most {MAX_SAMPLES} samples"
        raise Refused(400, text, param="n")
    drawn = entropy.getrandbits(62)
    seed = fields.integer("seed", 0, -(2**63), 2**64) if fields.has("seed") else None
    min_version = fields.integer("min_version", 0, 0, MOST)
    timeout = fields.number("timeout_secs", request_secs)
    groups = []
    for i, prompt in enumerate(prompts):
        # A seed of the caller's gives a prompt the same samples wherever in the list it stands.
        base = drawn + i if seed is None else seed
        ids = bool(prompt) and isinstance(prompt[0], int)
        request = GenerateRequest(
            request_id=f"{request_id}-{i}",
            messages=() if ids else prompt,
            sampling=sampling,
            seeds=tuple(sample_seed(base, k) for k in range(sampling.n)),
            min_version=min_version,
            timeout_secs=timeout,
        )
        groups.append((request, np.array(prompt, np.int32) if ids else None))
    problems = wrong_values(groups[0][0])
    if problems:
        raise Refused(400, problems)
    return _whole(fields, request_id, chat, tuple(groups))


def _whole(fields: Fields, request_id: str, chat: bool, groups: tuple[Any, ...]) -> OpenAIRequest:
    """Read what shapes the answer, and refuse what is left."""
    stream = fields.flag("stream")
    options = fields.any("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise wrong("stream_options", options, "an object, and only with stream = true")
    options = Fields(options or {})
    if chat:
        logprobs = fields.flag("logprobs")
        fields.only("top_logprobs", 0)
    else:
        # Only the drawn token's log-prob leaves the device: 1 is accepted, clients mean that by it.
        logprobs = fields.has("logprobs") and fields.integer("logprobs", 0, 0, 1) >= 0
    request = OpenAIRequest(
        request_id=request_id,
        chat=chat,
        model=fields.text("model", ""),
        groups=groups,
        logprobs=logprobs,
        stream=stream,
        include_usage=options.flag("include_usage"),
        return_token_ids=fields.flag("return_token_ids"),
        # Two names of one wish; both are read, whatever the first says.
        keep_stop=any([fields.flag("include_stop_str_in_output"), fields.flag("no_stop_trim")]),
    )
    options.only("include_obfuscation", False)
    options.end()
    fields.text("user", "")  # a name for OpenAI's own statistics
    for name, *allowed in _NEUTRAL:
        fields.only(name, *allowed)
    fields.end()
    return request


_NEUTRAL: tuple[tuple[Any, ...], ...] = (
    ("best_of", 1),
    ("echo", False),
    ("suffix", ""),
    ("frequency_penalty", 0),
    ("presence_penalty", 0),
    ("tools", []),
    ("tool_choice", "none", "auto"),
    ("functions", []),
    ("response_format", {"type": "text"}),
    ("modalities", ["text"]),
    ("store", False),
    ("metadata", {}),
    ("service_tier", "auto", "default"),
)
"""What is not there, and the values that ask for nothing."""


def _sampling(fields: Fields, chat: bool) -> SamplingParams:
    limit = MOST if chat else COMPLETION_TOKENS
    most = fields.integer("max_tokens", limit, 1, MOST)
    if chat:
        most = fields.integer("max_completion_tokens", most, 1, MOST)
    marks = fields.has("thinking_marks")
    try:
        return SamplingParams(
            n=fields.integer("n", 1, 1, MAX_SAMPLES),
            max_new_tokens=most,
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=fields.integer("top_k", 0, 0, MOST),
            stop=fields.texts("stop"),
            min_p=fields.number("min_p", 0.0),
            min_new_tokens=fields.integer("min_tokens", 0, 0, MOST),
            stop_token_ids=fields.integers("stop_token_ids"),
            ignore_eos=fields.flag("ignore_eos"),
            banned_token_ids=fields.integers("banned_token_ids"),
            logit_bias=fields.biases("logit_bias"),
            max_thinking_tokens=fields.integer("thinking_token_budget", 0, 0, MOST),
            **({"thinking_marks": fields.texts("thinking_marks")} if marks else {}),
        )
    except ValueError as e:
        raise Refused(400, str(e)) from e


def _prompts(value: Any, vocab: int) -> list[Prompt]:
    """A string, a list of strings, token ids, or a list of token ids."""
    allowed = f"a string, a list of strings, token ids in [0, {vocab}), or a list of such"
    if value is None:
        raise Refused(400, f"prompt is missing; give {allowed}", param="prompt")
    many = isinstance(value, list) and value and isinstance(value[0], str | list)
    values = value if many else [value]
    if len(values) > MAX_SAMPLES:
        raise Refused(400, f"{len(values)} prompts; at most {MAX_SAMPLES}", param="prompt")
    return [_prompt(v, vocab, allowed) for v in values]


def _prompt(value: Any, vocab: int, allowed: str) -> Prompt:
    if isinstance(value, str) and is_unicode(value):
        return (Message(role="text", content=value),)
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, allowed)
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            text = f"prompt holds {named(token)}; token ids are integers in [0, {vocab})"
            raise Refused(400, text, param="prompt")
    return tuple(value)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of at least one message")
    return tuple(_message(f"messages[{i}]", turn) for i, turn in enumerate(value))


def _message(name: str, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise wrong(name, turn, "an object with role and content")
    fields = Fields(turn)
    role = fields.text("role", "")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise wrong(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    content = fields.any("content")
    if isinstance(content, list):  # parts; text is the only kind this model reads
        content = "".join(_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str) or not is_unicode(content):
        raise wrong(f"{name}.content", content, "a string, or a list of text parts")
    for other in ("tool_calls", "refusal", "audio", "function_call"):
        fields.only(other, [])
    for ignored in ("name", "tool_call_id"):
        fields.text(ignored, "")
    fields.end()
    return Message(role=role, content=content)


def _part(name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise wrong(name, part, "a part of type text")
    return Fields(part).text("text", "")
