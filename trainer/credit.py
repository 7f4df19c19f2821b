"""From committed groups to sequences with credit: advantages and aggregation, on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infra.contracts.errors import SchemaMismatch
from infra.contracts.records import Group, Judgement, Rollout
from trainer.config import ObjectiveConfig
from trainer.objective.advantage import group_advantages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """One rollout as the packer needs it."""

    prompt_ids: np.ndarray
    """int32[P], P >= 1"""
    response_ids: np.ndarray
    """int32[T]"""
    loss_mask: np.ndarray
    """bool[T]: the trainable tokens."""
    raw_logprobs: np.ndarray
    """float32[T]"""
    behaviour_logprobs: np.ndarray
    """float32[T]"""
    temperature: float
    """> 0 (greedy rollouts have the log-probs of temperature 1)."""
    advantage: float
    scale: float
    """Numerator of the aggregation for each of its tokens."""
    max_new_tokens: int

    @property
    def trainable_tokens(self) -> int:
        return int(self.loss_mask.sum())


def training_sequences(
    groups: Iterable[Group], config: ObjectiveConfig, fixed_length: int
) -> list[TrainingSequence]:
    """Give every trainable rollout its credit; order of groups, then of rollouts.

    ``scale`` is, for a rollout of weight w and T trainable tokens: ``token_mean`` w,
    ``sequence_mean`` w / T, ``fixed`` w / fixed_length. Divide by ``global_denominator``.

    Raises:
        SchemaMismatch: a rollout has no token ids or log-probs.
    """
    out = []
    for group in groups:
        pairs = _trainable(group)
        advantages = _advantages(pairs, config)
        for rollout, judgement in pairs:
            length = max(1, int(rollout.loss_mask.sum()))
            per = {"token_mean": 1, "sequence_mean": length, "fixed": fixed_length}
            out.append(
                TrainingSequence(
                    prompt_ids=rollout.prompt_ids,
                    response_ids=rollout.response_ids,
                    loss_mask=rollout.loss_mask,
                    raw_logprobs=rollout.raw_logprobs,
                    behaviour_logprobs=rollout.behaviour_logprobs,
                    temperature=rollout.sampling.temperature or 1.0,
                    advantage=advantages[rollout.sample_index],
                    scale=judgement.weight / per[config.aggregation],
                    max_new_tokens=rollout.sampling.max_new_tokens,
                )
            )
    return out


def global_denominator(sequences: Sequence[TrainingSequence], config: ObjectiveConfig) -> float:
    """Trainable tokens (``token_mean``), else sequences that have any; at least 1."""
    counts = [s.trainable_tokens for s in sequences]
    total = sum(counts) if config.aggregation == "token_mean" else sum(c > 0 for c in counts)
    return float(max(1, total))


def _trainable(group: Group) -> list[tuple[Rollout, Judgement]]:
    """Trainable rollouts with their judgements, joined by rollout id."""
    judgements = {j.rollout_id: j for j in group.judgements}
    pairs = []
    for rollout in group.rollouts:
        judgement = judgements.get(rollout.rollout_id)
        if judgement is None or not judgement.trainable:
            continue
        if rollout.response_ids is None or rollout.raw_logprobs is None:
            raise SchemaMismatch(
                f"group {group.group_id}: rollout {rollout.rollout_id} has text alone; "
                "only rollouts with token ids and log-probs can be trained on"
            )
        pairs.append((rollout, judgement))
    return pairs


def _advantages(
    pairs: Sequence[tuple[Rollout, Judgement]], config: ObjectiveConfig
) -> dict[int, float]:
    """Advantage by sample index: sequences of one trajectory count once and share it."""
    rewards = {rollout.sample_index: judgement.reward for rollout, judgement in pairs}
    values = group_advantages(list(rewards.values()), config.advantage, config.eps)
    return dict(zip(rewards, map(float, values), strict=True))
