"""A group's sampling parameters, made ready for the engine and for who ends its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infra.contracts.errors import InferenceError
from infra.contracts.sampling_params import MAX_BIAS, MAX_BIASED, SamplingParams
from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.inference_worker.engine.thinking import MARK_TOKENS, NOT_THINKING, Thinker

ALWAYS = 2**31 - 1
NEVER = -np.inf


class RuleTokenizer(Protocol):
    """What rules need of a tokenizer; the last two only where an option asks."""

    eos_ids: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Text into ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """What all samples of a group have in common."""

    sampling: SamplingParams
    ends: frozenset[int]
    """Tokens that end a response."""
    biases: tuple[tuple[int, float, int], ...]
    """As ``SlotSampling.biases``."""
    marks: tuple[tuple[int, ...], ...]
    """Ids of the two thinking marks; empty without a budget."""
    prompt_ids: np.ndarray

    def slot(self, seed: int, thinker: Thinker | None) -> SlotSampling:
        """How the engine draws one sample from here on."""
        sampling = self.sampling
        return SlotSampling(
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            biases=self.biases,
            thinking=NOT_THINKING if thinker is None else thinker.slot,
        )

    def thinker(self, before: Sequence[int]) -> Thinker | None:
        """Where a sample stands behind the prompt and its earlier segments; None: no budget."""
        if not self.marks:
            return None
        thinker = Thinker(self.sampling.max_thinking_tokens, *self.marks)
        thinker.read(self.prompt_ids)
        for token in before:
            thinker.take(token)
        return thinker


def rules_for(
    sampling: SamplingParams, prompt_ids: np.ndarray, tokenizer: RuleTokenizer
) -> SamplingRules:
    """Check parameters against the vocabulary and make them ready.

    Raises:
        InferenceError: not retryable; a token id outside the vocabulary, nothing left to draw, or
            a thinking mark that is no token sequence.
    """
    own = () if sampling.ignore_eos else tokenizer.eos_ids
    ends = frozenset((*own, *sampling.stop_token_ids))
    banned = {*sampling.banned_token_ids}
    banned |= {token for token, bias in sampling.logit_bias if bias == -MAX_BIAS}
    biases = [(token, NEVER, ALWAYS) for token in sorted(banned)]
    biases += [(t, bias, ALWAYS) for t, bias in sampling.logit_bias if t not in banned]
    if sampling.min_new_tokens:
        first = len(prompt_ids) + sampling.min_new_tokens
        biases += [(token, NEVER, first) for token in sorted(ends - banned)]
    named = [token for token, _, _ in biases] + list(sampling.stop_token_ids)
    if named:
        vocab = tokenizer.vocab_size
        if max(named) >= vocab:
            raise _wrong(f"token id {max(named)} is outside the vocabulary; give ids below {vocab}")
        if len({token for token, bias, _ in biases if bias == NEVER}) >= vocab:
            raise _wrong("banned tokens and ends leave nothing to draw; ban fewer")
        if len(biases) > MAX_BIASED:
            raise _wrong(f"{len(biases)} token ids to ban or bias; at most {MAX_BIASED}")
    marks = ()
    if sampling.max_thinking_tokens:
        marks = tuple(_mark(text, tokenizer) for text in sampling.thinking_marks)
    return SamplingRules(
        sampling=sampling, ends=ends, biases=tuple(biases), marks=marks, prompt_ids=prompt_ids
    )


def _mark(text: str, tokenizer: RuleTokenizer) -> tuple[int, ...]:
    try:
        ids = tuple(tokenizer.encode(text).tolist())
    except ValueError as e:
        raise _wrong(f"thinking_marks: {e}") from e
    if not 1 <= len(ids) <= MARK_TOKENS:
        raise _wrong(f"the thinking mark {text!r} has {len(ids)} tokens; 1 to {MARK_TOKENS}")
    return ids


def _wrong(text: str) -> InferenceError:
    return InferenceError(text, retryable=False)
