"""How a group is sampled: a record of its own file, because most of it is checks."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BIASED = 128
"""Token ids that one request may ban, bias or keep from ending it, together."""
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a group is sampled. Part of every rollout."""

    n: int = 8
    """Rollouts per group."""
    max_new_tokens: int = 64
    temperature: float = 1.0
    """0 means greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the token that completes one is kept in the ids and text."""
    min_p: float = 0.0
    """Keep only tokens at least so probable, relative to the most probable one; 0 keeps all."""
    min_new_tokens: int = 0
    """No end token, stop token or stop string ends a response before so many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, like the end of sequence: kept in the ids, with log-probs."""
    ignore_eos: bool = False
    """Go on behind the end of sequence."""
    banned_token_ids: tuple[int, ...] = ()
    """Never drawn."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), from -100 (never drawn) to 100."""
    max_thinking_tokens: int = 0
    """After so many tokens within the thinking marks the second mark is forced; 0: no limit."""
    thinking_marks: tuple[str, ...] = ("<think>", "</think>")
    """Texts that open and close thinking; the prompt may end within it."""

    def __post_init__(self) -> None:
        ids = (*self.banned_token_ids, *(token for token, _ in self.logit_bias))
        biases = [bias for _, bias in self.logit_bias]
        counts = ("min_new_tokens", "max_thinking_tokens")
        checks = (
            (self.n >= 1, f"n = {self.n}; at least 1 is needed"),
            (self.max_new_tokens >= 1, f"max_new_tokens = {self.max_new_tokens}; at least 1"),
            (self.temperature >= 0, f"temperature = {self.temperature}; must be >= 0"),
            (0 < self.top_p <= 1, f"top_p = {self.top_p}; must be in (0, 1]"),
            (self.top_k >= 0, f"top_k = {self.top_k}; must be >= 0 (0 = no limit)"),
            (all(self.stop), "stop holds an empty string; give non-empty strings"),
            (0 <= self.min_p <= 1, f"min_p = {self.min_p}; must be in [0, 1] (0 = no limit)"),
            *((getattr(self, c) >= 0, f"{c} = {getattr(self, c)}; must be >= 0") for c in counts),
            (
                self.min_new_tokens <= self.max_new_tokens,
                f"min_new_tokens = {self.min_new_tokens} is above max_new_tokens = "
                f"{self.max_new_tokens}",
            ),
            (
                all(0 <= token < 2**31 for token in (*ids, *self.stop_token_ids)),
                "stop_token_ids, banned_token_ids and logit_bias hold a token id outside [0, 2^31)",
            ),
            (
                len(set(ids)) == len(ids),
                "banned_token_ids and logit_bias name a token twice; name each once",
            ),
            (
                all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases),
                f"logit_bias = {biases[:3]}; each must be in [-100, 100] (-100 = never)",
            ),
            (
                len(ids) + len(self.stop_token_ids) <= MAX_BIASED,
                f"{len(ids) + len(self.stop_token_ids)} token ids to stop at, ban or bias; at most "
                f"{MAX_BIASED}",
            ),
            (
                len(self.thinking_marks) == 2 and all(self.thinking_marks),
                f"thinking_marks = {list(self.thinking_marks)}; give two texts, e.g. "
                '["<think>", "</think>"]',
            ),
        )
        problems = [text for ok, text in checks if not ok]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def reshapes(self) -> bool:
        """Whether it draws from another distribution than the temperature alone would give."""
        return bool(
            self.top_p < 1
            or self.top_k > 0
            or self.min_p > 0
            or self.min_new_tokens > 0
            or self.banned_token_ids
            or self.logit_bias
        )
