"""What an endpoint can tell about what it sampled, and what rollouts of it are good for.

A rollout is trainable only with everything: token ids, the log-prob of the distribution really
sampled from, the one of temperature only, and the policy version of every token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from infra.contracts.records import SamplingParams


class LogprobMeaning(StrEnum):
    """Of which distribution an engine's log-probs are."""

    BOTH = "both"
    """Ours: two columns, sampled and temperature only."""
    SAMPLED = "sampled"
    """After temperature, top-p and top-k (vLLM: ``--logprobs-mode processed_logprobs``)."""
    MODEL = "model"
    """Of the bare model, temperature 1 (vLLM's default). Also assumed where nothing is said."""
    NONE = "none"


class VersionMeaning(StrEnum):
    """What an engine knows about the policy's version."""

    PER_TOKEN = "per_token"
    PINNED = "pinned"
    """One version, named by whoever gave the endpoint."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declared before the first request; ``untrainable`` says what follows."""

    token_ids: bool
    logprobs: LogprobMeaning
    versions: VersionMeaning
    segments: bool = False
    """Whether it answers unended responses and goes on behind them (``segments``)."""
    options: bool = False
    """It takes what OpenAI's API lacks: top_k, min_p, min_tokens, stop_token_ids, ignore_eos."""
    thinking: bool = False
    """It can force the end of thinking, and says which tokens it forced."""


NATIVE = Capabilities(
    token_ids=True,
    logprobs=LogprobMeaning.BOTH,
    versions=VersionMeaning.PER_TOKEN,
    segments=True,
    options=True,
    thinking=True,
)
BEYOND_OPENAI = ("top_k", "min_p", "min_new_tokens", "stop_token_ids", "ignore_eos")


def weakest(capabilities: Iterable[Capabilities]) -> Capabilities:
    """What all of several endpoints can."""
    found = tuple(capabilities)

    def last(kinds: type[StrEnum], name: str) -> StrEnum:
        order = list(kinds)
        return max((getattr(c, name) for c in found), key=order.index)

    return Capabilities(
        token_ids=all(c.token_ids for c in found),
        logprobs=last(LogprobMeaning, "logprobs"),
        versions=last(VersionMeaning, "versions"),
        segments=all(c.segments for c in found),
        options=all(c.options for c in found),
        thinking=all(c.thinking for c in found),
    )


def unsupported(capabilities: Capabilities, sampling: SamplingParams) -> str:
    """What it cannot do of what is asked; empty: all of it can be done."""
    asked = [name for name in BEYOND_OPENAI if getattr(sampling, name)]
    if asked and not capabilities.options:
        return f"it takes no {', '.join(asked)}"
    if sampling.max_thinking_tokens and not capabilities.thinking:
        return (
            "max_thinking_tokens needs an engine that marks what it forced: a headrace worker by "
            "http://, or by openai+http:// with thinking=yes"
        )
    return ""


def untrainable(capabilities: Capabilities, sampling: SamplingParams) -> str:
    """Why rollouts sampled so cannot be trained on; empty: they can."""
    if not capabilities.token_ids:
        return "it returns no token ids"
    if capabilities.logprobs is LogprobMeaning.NONE:
        return "it returns no log-probs"
    if capabilities.versions is VersionMeaning.NONE:
        return "nobody says which policy version it serves; give version=N in its address"
    if capabilities.logprobs is LogprobMeaning.BOTH:
        return ""
    if sampling.temperature == 0:
        return "it has one log-prob per token, and its meaning at temperature 0 is not known"
    if sampling.reshapes:
        return (
            "it has one log-prob per token; with top_p, top_k, min_p, min_new_tokens, bans or "
            "biases two are needed"
        )
    if capabilities.logprobs is LogprobMeaning.MODEL and sampling.temperature != 1:
        return (
            f"its log-probs are of temperature 1, not {sampling.temperature:g}; if it applies "
            "the temperature, say logprobs=sampled in its address"
        )
    return ""
