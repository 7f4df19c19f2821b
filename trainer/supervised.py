"""Supervised steps on addition problems, by the same packed step that reinforcement uses.

Cross-entropy is REINFORCE with every advantage 1: loss = -sum log pi(answer) / tokens. Greedy
accuracy needs no decoding: greedy decoding gives the answer exactly if, along the answer, the most
likely token is always the answer's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from infra.contracts.records import Prompt
from infra.prompts.addition import fresh_problems
from infra.text.tokenizer import Tokenizer
from trainer.batch import Batch
from trainer.config import OptimizerConfig
from trainer.credit import TrainingSequence
from trainer.model.config import ModelConfig
from trainer.model.params_io import to_named
from trainer.model.transformer import Params, head_logits, hidden_states
from trainer.objective.reinforce import Reinforce
from trainer.optimizer import build_optimizer
from trainer.packing import PackingConfig, pack, scatter
from trainer.state import new_state
from trainer.step import StepSettings, build_train_step

WHOLE_BATCH = 1 << 20
"""Tokens per micro-batch: the tiny model needs no cutting."""


class Supervised:
    """A model that is being warm-started; takes ``params`` over."""

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        optimizer: OptimizerConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        held_out: float,
    ) -> None:
        settings = StepSettings(
            model=model, objective=Reinforce(), optimizer=optimizer, head_tokens=WHOLE_BATCH
        )
        self._tokenizer, self._seed, self._held_out = tokenizer, seed, held_out
        self._packing = PackingConfig(
            micro_batch_tokens=WHOLE_BATCH, attention_tokens=6 * model.dim
        )
        self._step = build_train_step(settings)
        self._hits = jax.jit(lambda params, batch: greedy_hits(params, model, batch))
        self._state = new_state(params, build_optimizer(optimizer), seed)

    def learn(self, step: int, problems: int) -> float:
        """One optimizer call on fresh problems; return its loss."""
        batch = self._pack(self._examples(step, problems), step)
        self._state, metrics = self._step(self._state, batch)
        return float(metrics.loss)

    def accuracy(self, step: int, problems: int) -> float:
        """Share of the problems of ``step`` that greedy decoding answers exactly."""
        examples = self._examples(step, problems)
        batch = self._pack(examples, 0)
        hits = scatter(batch, np.asarray(self._hits(self._state.params, batch)), examples)
        return float(np.mean([bool(np.all(h == 1)) for h in hits]))

    def named(self) -> dict[str, np.ndarray]:
        """The parameters by their Hugging Face names."""
        return to_named(self._state.params)

    def _examples(self, step: int, problems: int) -> list[TrainingSequence]:
        drawn = fresh_problems(self._seed, step, problems, self._held_out)
        return [self._example(prompt) for prompt in drawn]

    def _example(self, prompt: Prompt) -> TrainingSequence:
        answer = self._tokenizer.encode(prompt.answer)
        nothing = np.zeros(answer.size, np.float32)
        return TrainingSequence(
            prompt_ids=self._tokenizer.encode_prompt(prompt.messages),
            response_ids=answer,
            loss_mask=np.ones(answer.size, bool),
            raw_logprobs=nothing,
            behaviour_logprobs=nothing,
            temperature=1.0,
            advantage=1.0,
            scale=1.0,
            max_new_tokens=answer.size,
        )

    def _pack(self, examples: list[TrainingSequence], step: int) -> Batch:
        tokens = sum(e.response_ids.size for e in examples)
        return pack(examples, self._packing, denominator=float(tokens), step=step)


def greedy_hits(params: Params, model: ModelConfig, batch: Batch) -> jax.Array:
    """float32[1,M]: 1 where the target is the most likely token (a batch of one micro-batch)."""
    rows = (batch.tokens[0], batch.positions[0], batch.segments[0], batch.prefixes[0])
    hidden = hidden_states(params, model, *rows)
    chosen = hidden.reshape(-1, hidden.shape[-1])[batch.sources[0]]
    best = jnp.argmax(head_logits(params, model, chosen), axis=-1)
    return (best == batch.targets[0]).astype(jnp.float32)[None]
