"""The engine interface: JetStream's shape and names, plus weight versions.

JetStream itself is archived and heavy, so the names are kept and the package is not needed. As in
its last published release ``prefill`` returns a prefix only, and the first token of a slot comes
from the first ``generate`` after its insertion. What JetStream lacks: ``update_params`` between two
steps, per-slot sampling settings with seeds, and both log-probs of every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.inference_worker.engine.thinking import NOT_THINKING, SlotThinking

Params = Any
Prefix = Any
"""Keys and values of one prompt, ready to be inserted into any number of slots."""
DecodeState = Any
"""Everything a step reads and writes on the device; donated: never use an old one again."""

TOKEN, BEHAVIOUR, RAW = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSampling:
    """How one slot is sampled."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    biases: tuple[tuple[int, float, int], ...] = ()
    """(token id, what is added to its logit, the position from which on it no longer is)."""
    thinking: SlotThinking = NOT_THINKING


@dataclass(frozen=True, slots=True, eq=False)
class SlotData:
    """One slot's share of a step."""

    tokens: int
    log_prob: float
    """Under the distribution drawn from."""
    raw_log_prob: float
    """Under the temperature alone."""


@dataclass(frozen=True, slots=True, eq=False)
class ResultTokens:
    """What one step drew in all slots, or several; packed: one copy to the host serves the call.

    The properties are those of one step; ``steps`` takes several apart.
    """

    data: Any
    """float32[3, slots]: token ids (exact below 2^24), behaviour and raw log-probs; of several
    steps float32[steps, 3, slots]."""
    version: int
    """Policy version that drew them."""

    def convert_to_numpy(self) -> ResultTokens:
        """Wait for the step and fetch it."""
        return ResultTokens(np.array(self.data), self.version)

    def steps(self) -> list[ResultTokens]:
        """Each step's result, oldest first."""
        if self.data.ndim == 2:
            return [self]
        return [ResultTokens(data, self.version) for data in self.data]

    @property
    def tokens(self) -> np.ndarray:
        return self.data[TOKEN].astype(np.int32)

    @property
    def log_prob(self) -> np.ndarray:
        return self.data[BEHAVIOUR]

    @property
    def raw_log_prob(self) -> np.ndarray:
        return self.data[RAW]

    def get_result_at_slot(self, slot: int) -> SlotData:
        token, behaviour, raw = (float(x) for x in self.data[:, slot])
        return SlotData(int(token), behaviour, raw)


class Engine(Protocol):
    """Slots that decode together. One thread at a time."""

    max_concurrent_decodes: int
    """Number of slots."""
    max_prefill_length: int
    """Longest prompt, so that one token still fits behind it."""
    version: int
    """Policy version of the current parameters; -1 before the first."""

    def load_params(self, arrays: dict[str, np.ndarray]) -> Params:
        """Turn named arrays into device parameters of this engine's dtype, beside the current."""

    def update_params(self, params: Params, version: int) -> None:
        """Use ``params`` from the next call on. Prefixes made before are stale."""

    def init_decode_state(self) -> DecodeState:
        """All slots empty."""

    def prefill(self, *, padded_tokens: np.ndarray, true_length: int) -> Prefix:
        """Compute one prompt's prefix."""

    def prefill_batch(self, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        """Compute several prompts' prefixes in as few calls as possible."""

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, sampling: SlotSampling
    ) -> DecodeState:
        """Put one prefix into one slot."""

    def bulk_insert(
        self,
        prefixes: Sequence[Prefix],
        decode_state: DecodeState,
        slots: Sequence[int],
        samplings: Sequence[SlotSampling],
    ) -> DecodeState:
        """Fill many slots at once; a group's slots are given the same prefix."""

    def generate(
        self, decode_state: DecodeState, *, slots: Sequence[int] | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """Draw the next token of the given slots, no others; None: of all.

        An engine may draw several at once; what follows a slot's end is nobody's.
        """
