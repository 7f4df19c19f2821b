"""Length penalty: a shaping term, never part of the task reward.

``soft_overlong`` is DAPO's (arXiv 2503.14476, equation 13), with T response tokens::

    0                                     T <= max - cache
    ((max - cache) - T) / cache           max - cache < T <= max
    -1                                    T > max

``per_token`` is ``-T``. Both are multiplied by ``scale``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from curation.scorer import SettingsDigest, make_score
from infra.contracts.errors import ScorerError
from infra.contracts.records import Prompt, Rollout, Score, Verdict


@dataclass(frozen=True, kw_only=True)
class LengthPenalty(SettingsDigest):
    """A number <= 0; the verdict is ``pass`` where nothing was taken off."""

    name: ClassVar[str] = "length_penalty"
    version: ClassVar[int] = 1
    shaping: ClassVar[bool] = True

    kind: Literal["soft_overlong", "per_token"] = "soft_overlong"
    scale: float = 1.0
    max_tokens: int = 0
    """0: the rollout's own ``max_new_tokens``."""
    cache_tokens: int = 0
    """Width of the slope (``soft_overlong``); 0: a fifth of ``max_tokens``."""

    def __post_init__(self) -> None:
        if self.scale < 0 or self.max_tokens < 0 or self.cache_tokens < 0:
            raise ValueError("scale, max_tokens and cache_tokens must be >= 0")
        if 0 < self.max_tokens < self.cache_tokens:
            raise ValueError(f"cache_tokens = {self.cache_tokens} is more than max_tokens")

    def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Return the penalty. Raises ``ScorerError`` for a rollout without token ids."""
        if rollout.response_ids is None:
            raise ScorerError("length_penalty needs token ids; this rollout has text only")
        tokens = len(rollout.response_ids)
        raw = -float(tokens) if self.kind == "per_token" else self._soft_overlong(tokens, rollout)
        value = self.scale * raw if raw else 0.0
        verdict = Verdict.PASS if value == 0 else Verdict.FAIL
        return make_score(self, verdict, value, f"{tokens} tokens", {"tokens": float(tokens)})

    def _soft_overlong(self, tokens: int, rollout: Rollout) -> float:
        limit = self.max_tokens or rollout.sampling.max_new_tokens
        cache = min(self.cache_tokens or max(limit // 5, 1), limit)
        return max(-1.0, min(0.0, (limit - cache - tokens) / cache))
