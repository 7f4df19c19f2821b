"""Our engine as an ``Engine`` of google-jetstream 0.2.2, for who has JetStream's server around it.

The package is archived and optional (docs/worker.md says how to install it without TensorFlow), so
nothing here imports it before ``import_jetstream``. JetStream kills its whole process when one of
its threads raises; what can be mended is therefore mended here, not refused.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from infra.contracts.errors import ConfigError
from infra.text.tokenizer import Tokenizer
from trainer.inference_worker.engine.engine_api import TOKEN, DecodeState, Engine, Params, Prefix
from trainer.inference_worker.engine.engine_api import SlotSampling as Sampling

BEGIN = -1
"""JetStream puts its begin token before prompts that are ids already. Ours are exact: this one is
taken away again."""
SMALLEST_PADDED = 16
"""JetStream pads prompts to powers of two from here on, and knows no other longest prompt."""


def import_jetstream() -> SimpleNamespace:
    """Import the parts of JetStream that an engine meets, mending what time has broken.

    Raises:
        ConfigError: the package is not installed.
    """
    if importlib.util.find_spec("jetstream") is None:
        raise ConfigError(
            "google-jetstream is not installed: pip install --no-deps google-jetstream==0.2.2 and "
            "what docs/worker.md names beside it"
        )
    if "seqio" not in sys.modules and importlib.util.find_spec("seqio") is None:
        # Wanted for SentencePiece vocabularies alone, and it brings TensorFlow.
        seqio, vocabularies = ModuleType("seqio"), ModuleType("seqio.vocabularies")
        vocabularies.SentencePieceVocabulary = vocabularies.Vocabulary = object
        seqio.vocabularies = vocabularies
        sys.modules |= {"seqio": seqio, "seqio.vocabularies": vocabularies}
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree_util.tree_map
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    parts = {
        name.rsplit(".", 1)[1]: importlib.import_module(f"jetstream.{name}")
        for name in (
            "engine.engine_api",
            "engine.tokenizer_api",
            "engine.tokenizer_pb2",
            "engine.token_utils",
            "core.orchestrator",
            "core.proto.jetstream_pb2",
        )
    }
    # Importing the orchestrator makes every library of the process log its debug lines.
    root.setLevel(level)
    root.handlers = handlers
    return SimpleNamespace(**parts)


class State(NamedTuple):
    """A decode state, and what JetStream wants to know of each slot: int64[slots]."""

    ours: DecodeState
    prompt: np.ndarray
    """Tokens of the prompt."""
    drawn: np.ndarray
    """Tokens drawn since."""


class JetStreamEngine:
    """Satisfies ``jetstream.engine.engine_api.Engine``; one for both prefill and generate.

    JetStream has no sampling settings per request, so one serves all; sample i of the engine's
    life has seed ``sampling.seed + i``. It knows no weight versions either: ``load_params`` once.
    """

    samples_per_slot = 1
    colocated_cpus = None

    def __init__(self, engine: Engine, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._jetstream = import_jetstream()
        self._jetstream.engine_api.Engine.register(type(self))
        self._jetstream.tokenizer_api.Tokenizer.register(JetStreamTokenizer)
        longest = engine.max_prefill_length
        if longest < SMALLEST_PADDED:
            raise ConfigError(
                f"max_len = {longest + 1}; JetStream needs {SMALLEST_PADDED + 1} or more"
            )
        self._engine, self._tokenizer = engine, tokenizer
        self._sampling, self._inserted = sampling, 0
        self.max_concurrent_decodes = engine.max_concurrent_decodes
        self.max_prefill_length = 1 << (longest.bit_length() - 1)
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("device",))
        # JetStream prefills and generates in two threads; our engines are for one at a time.
        self._lock = threading.Lock()

    def load_params(self, arrays: dict[str, np.ndarray]) -> Params:
        """Load named arrays (a Hugging Face folder's) and use them."""
        with self._lock:
            params = self._engine.load_params(arrays)
            self._engine.update_params(params, self._engine.version + 1)
        return params

    def init_decode_state(self) -> State:
        none = np.zeros(self.max_concurrent_decodes, np.int64)
        return State(self._engine.init_decode_state(), none, none)

    def prefill(
        self,
        *,
        params: Params,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        existing_prefix: Prefix | None = None,
    ) -> tuple[Prefix, int]:
        """Compute one prompt's prefix; the length goes with it."""
        if existing_prefix is not None:
            raise NotImplementedError("a prefix cannot be continued; prefill the whole prompt")
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        tokens = tokens[tokens != BEGIN]
        if not tokens.size:
            tokens = np.array([self._tokenizer.pad_id], np.int32)
        with self._lock:
            prefix = self._engine.prefill(padded_tokens=tokens, true_length=tokens.size)
        return prefix, tokens.size

    def insert(self, prefix: tuple[Prefix, int], decode_state: State, slot: int) -> State:
        """Put a prefix into a slot. JetStream deletes the prefix afterwards."""
        ours, (prompt, drawn) = decode_state.ours, (column.copy() for column in decode_state[1:])
        prompt[slot], drawn[slot] = int(prefix[1]), 0
        seed = (self._sampling.seed + self._inserted) % (1 << 32)
        self._inserted += 1
        with self._lock:
            sampling = dataclasses.replace(self._sampling, seed=seed)
            ours = self._engine.insert(prefix[0], ours, slot, sampling)
        return State(ours, prompt, drawn)

    def generate(self, params: Params, decode_state: State) -> tuple[State, Any]:
        """Draw the next token of every slot, as JetStream's ``ResultTokens``.

        A row is tokens, whether each is valid, and the length so far. A token beyond the cache is
        not valid, which is how JetStream learns that the slot is free.
        """
        with self._lock:
            ours, result = self._engine.generate(decode_state.ours)
        steps = result.convert_to_numpy().steps()
        tokens = np.stack([step.data[TOKEN] for step in steps], axis=1).astype(np.int32)
        places = decode_state.drawn[:, None] + np.arange(1, len(steps) + 1)
        valid = decode_state.prompt[:, None] + places <= self._engine.max_prefill_length + 1
        drawn = decode_state.drawn + len(steps)
        rows = np.concatenate([tokens, valid, drawn[:, None]], axis=1).astype(np.int32)
        count = len(steps)
        found = self._jetstream.engine_api.ResultTokens(
            data=rows,
            tokens_idx=(0, count),
            valid_idx=(count, 2 * count),
            length_idx=(2 * count, 2 * count + 1),
            samples_per_slot=1,
        )
        return decode_state._replace(ours=ours, drawn=drawn), found

    def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def get_tokenizer(self) -> Any:
        """JetStream's description of a tokenizer; ours needs none."""
        return self._jetstream.tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        """Ours, whatever ``metadata`` says."""
        return JetStreamTokenizer(self._tokenizer, self._jetstream.token_utils)


class JetStreamTokenizer:
    """Satisfies ``jetstream.engine.tokenizer_api.Tokenizer``."""

    bos_id = BEGIN

    def __init__(self, tokenizer: Tokenizer, token_utils: Any) -> None:
        self._tokenizer, self._token_utils = tokenizer, token_utils
        self.pad_id, self.eos_id = tokenizer.pad_id, tokenizer.eos_ids[0]
        self.stop_tokens = set(tokenizer.eos_ids)

    def encode(
        self,
        s: str,
        *,
        is_bos: bool = True,
        prefill_lengths: list[int] | None = None,
        max_prefill_length: int | None = None,
        jax_padding: bool = True,
    ) -> tuple[jax.Array | np.ndarray, int]:
        """Ids padded to a power of two, and how many they are; of a long text the last ones."""
        return self._token_utils.pad_tokens(
            self._tokenizer.encode(s, begin=is_bos),
            BEGIN,
            self.pad_id,
            is_bos=False,
            prefill_lengths=prefill_lengths,
            max_prefill_length=max_prefill_length,
            jax_padding=jax_padding,
        )

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """One token or several into text; a piece of a character becomes U+FFFD."""
        return self._tokenizer.decode(token_ids)
