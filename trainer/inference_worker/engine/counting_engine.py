"""The fake engine: predictable by hand, no model, no device. For tests of what surrounds an engine.

A slot's first token is ``(last prompt token + seed) % vocab``, every further one is one more than
the one before. Log-probs are minus the token, and minus twice the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.inference_worker.engine.engine_api import ResultTokens, SlotSampling


class CountingEngine:
    """Satisfies ``engine_api.Engine``; a decode state is an int array [slots]."""

    def __init__(self, slots: int, max_len: int, vocab: int, steps: int = 1) -> None:
        self.max_concurrent_decodes = slots
        self.max_prefill_length = max_len - 1
        self.version = -1
        self.prefilled: list[int] = []
        """Lengths of the prompts prefilled so far, for tests to look at."""
        self._vocab, self._steps = vocab, steps

    def load_params(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays are the parameters."""
        return dict(arrays)

    def update_params(self, params: object, version: int) -> None:
        """Only the version matters here."""
        self.version = version

    def init_decode_state(self) -> np.ndarray:
        """All zeros."""
        return np.zeros(self.max_concurrent_decodes, np.int64)

    def prefill(self, *, padded_tokens: np.ndarray, true_length: int) -> int:
        """A prefix is the prompt's last token."""
        return self.prefill_batch([padded_tokens[:true_length]])[0]

    def prefill_batch(self, prompts: Sequence[np.ndarray]) -> list[int]:
        """Last tokens, in order."""
        self.prefilled += [len(prompt) for prompt in prompts]
        return [int(prompt[-1]) for prompt in prompts]

    def insert(
        self, prefix: int, decode_state: np.ndarray, slot: int, sampling: SlotSampling
    ) -> np.ndarray:
        """Set one slot."""
        return self.bulk_insert([prefix], decode_state, [slot], [sampling])

    def bulk_insert(
        self,
        prefixes: Sequence[int],
        decode_state: np.ndarray,
        slots: Sequence[int],
        samplings: Sequence[SlotSampling],
    ) -> np.ndarray:
        """Set the slots to their first tokens."""
        state = decode_state.copy()
        state[list(slots)] = [p + s.seed for p, s in zip(prefixes, samplings, strict=True)]
        return state

    def generate(
        self, decode_state: np.ndarray, *, slots: Sequence[int] | None = None
    ) -> tuple[np.ndarray, ResultTokens]:
        """Count on, in the given slots."""
        run = np.zeros(decode_state.size, bool)
        run[slice(None) if slots is None else list(slots)] = True
        counts = decode_state + np.arange(self._steps)[:, None]
        tokens = np.where(run, counts % self._vocab, 0).astype(np.float32)
        data = np.stack([tokens, -tokens, -2 * tokens], axis=1)
        data = data[0] if self._steps == 1 else data
        return decode_state + self._steps * run, ResultTokens(data, self.version)
