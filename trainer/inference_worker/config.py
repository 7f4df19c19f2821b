"""[inference]: the worker's settings. Free of JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """[inference]: how many rollouts are decoded at once, how long, and how weights change."""

    slots: int = 96
    """Rollouts decoded together. Every step computes all slots: fit it to groups x n."""
    max_len: int = 256
    """Tokens of prompt and response together; fixes the size of the key/value cache."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of the layers' matrices in the engine; the cache, the head and all log-probs stay float32.
    bfloat16 halves them, int8 (with a scale per output channel) quarters them; how far log-probs
    move from the trainer's is in docs/worker.md."""
    tensor: int = 1
    """Devices that one replica is split over: heads, MLP and vocabulary, N-th parts each."""
    swap: Literal["boundary", "in_flight"] = "boundary"
    """``boundary``: finish running rollouts, then take the new weights (one version per rollout).
    ``in_flight``: between two tokens; versions are then per token."""
    kv_after_swap: Literal["keep", "recompute"] = "keep"
    """In flight, what rollouts under way go on with: the keys and values that older weights made,
    or, after another prefill of all that runs, the new ones' own."""
    prefill_tokens: int = 256
    """Prompt tokens that are prefilled in one call; a longer prompt goes alone, in such pieces."""
    steps_per_call: int = 1
    """Tokens drawn per call of the engine. More pays only where a step takes a few milliseconds:
    at 135 M a loop of steps was slower than single ones. Weights, deadlines and free slots are
    looked after between calls; no answer depends on it."""
    max_queue: int = 1024
    """Groups waiting for slots before new requests are turned away (retryable)."""
    poll_secs: float = 0.5
    """How often the store is asked for a newer version when no hint arrives."""

    def __post_init__(self) -> None:
        checks = (
            # one-row bfloat16 products are ten times slower than two-row ones on CPU
            (self.slots >= 2, f"slots = {self.slots}; at least 2"),
            (self.max_len >= 2, f"max_len = {self.max_len}; at least 2"),
            (self.prefill_tokens >= 16, f"prefill_tokens = {self.prefill_tokens}; at least 16"),
            (1 <= self.steps_per_call <= 64, f"steps_per_call = {self.steps_per_call}; 1 to 64"),
            (self.tensor >= 1, f"tensor = {self.tensor}; at least 1"),
            (self.max_queue >= 1, f"max_queue = {self.max_queue}; at least 1"),
            (self.poll_secs > 0, f"poll_secs = {self.poll_secs}; must be positive"),
        )
        problems = [text for ok, text in checks if not ok]
        if problems:
            raise ValueError("; ".join(problems))
