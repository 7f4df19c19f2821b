"""From committed groups to sequences with credit: advantages and aggregation, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.contracts.errors import SchemaMismatch
from infra.contracts.records import Group, Judgement, Rollout
from trainer.objective.advantage import step_advantages
from trainer.objective.config import ObjectiveConfig


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
    reward: float = 0.0
    trajectory: int = 0
    """Sequences of one trajectory share this number within their group."""

    @property
    def trainable_tokens(self) -> int:
        return int(self.loss_mask.sum())


def training_sequences(
    groups: Sequence[Group], config: ObjectiveConfig, fixed_length: int
) -> list[list[TrainingSequence]]:
    """Give every trainable rollout of a step its credit: a list per group, in order.

    ``scale`` is, for a rollout of weight w and T trainable tokens: ``token_mean`` and
    ``sequence_sum`` w, ``sequence_mean`` w / T, ``prompt_mean`` w / the group's trainable tokens,
    ``fixed`` w / fixed_length. Divide by ``global_denominator``.

    Raises:
        SchemaMismatch: a rollout has no token ids, or no log-probs where the objective needs them.
    """
    paired = [_trainable(group, needs_logprobs=config.reads_behaviour) for group in groups]
    credited = _advantages(paired, config)
    return [
        [_sequence(*pair, pairs, advantages, config, fixed_length) for pair in pairs]
        for pairs, advantages in zip(paired, credited, strict=True)
    ]


def global_denominator(groups: Sequence[Sequence[TrainingSequence]], kind: str) -> float:
    """Trainable tokens (``token_mean``), groups (``prompt_mean``), else sequences that have any
    trainable token; at least 1."""
    counts = [[s.trainable_tokens for s in group] for group in groups]
    total = {
        "token_mean": sum(map(sum, counts)),
        "prompt_mean": sum(any(group) for group in counts),
    }.get(kind, sum(count > 0 for group in counts for count in group))
    return float(max(1, total))


Pairs = list[tuple[Rollout, Judgement]]


def _sequence(
    rollout: Rollout,
    judgement: Judgement,
    siblings: Pairs,
    advantages: dict[int, float],
    config: ObjectiveConfig,
    fixed_length: int,
) -> TrainingSequence:
    tokens = int(rollout.loss_mask.sum())
    per = {
        "sequence_mean": tokens,
        "prompt_mean": sum(int(r.loss_mask.sum()) for r, _ in siblings),
        "fixed": fixed_length,
    }.get(config.aggregation, 1)
    unread = np.zeros(rollout.response_ids.size, np.float32)
    known = rollout.raw_logprobs is not None
    return TrainingSequence(
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        loss_mask=rollout.loss_mask,
        raw_logprobs=rollout.raw_logprobs if known else unread,
        behaviour_logprobs=rollout.behaviour_logprobs if known else unread,
        temperature=rollout.sampling.temperature or 1.0,
        advantage=advantages[rollout.sample_index],
        scale=judgement.weight / max(1, per),
        max_new_tokens=rollout.sampling.max_new_tokens,
        reward=judgement.reward,
        trajectory=rollout.sample_index,
    )


def _trainable(group: Group, *, needs_logprobs: bool) -> Pairs:
    """Trainable rollouts with their judgements, joined by rollout id."""
    judgements = {j.rollout_id: j for j in group.judgements}
    pairs = []
    for rollout in group.rollouts:
        judgement = judgements.get(rollout.rollout_id)
        if judgement is None or not judgement.trainable:
            continue
        if rollout.response_ids is None or (needs_logprobs and rollout.raw_logprobs is None):
            raise SchemaMismatch(
                f"group {group.group_id}: rollout {rollout.rollout_id} has text alone; "
                "only rollouts with token ids and log-probs can be trained on"
            )
        pairs.append((rollout, judgement))
    return pairs


def _advantages(paired: Sequence[Pairs], config: ObjectiveConfig) -> list[dict[int, float]]:
    """Advantage by sample index: sequences of one trajectory count once and share it."""
    rewards, lengths = [], []
    for pairs in paired:
        rewards.append({rollout.sample_index: judgement.reward for rollout, judgement in pairs})
        lengths.append(dict.fromkeys(rewards[-1], 0))
        for rollout, _ in pairs:
            lengths[-1][rollout.sample_index] += int(rollout.loss_mask.sum())
    return trajectory_advantages(rewards, lengths, config)


def trajectory_advantages(
    rewards: Sequence[dict[int, float]],
    lengths: Sequence[dict[int, int]],
    config: ObjectiveConfig,
) -> list[dict[int, float]]:
    """The configured advantages of a step: per group by trajectory, like ``rewards``.

    ``lengths``: trainable tokens, with the same keys.
    """
    values = step_advantages(
        [np.array(list(of.values())) for of in rewards],
        [np.array(list(of.values())) for of in lengths],
        config.advantage,
        config.eps,
        config.accept_above,
    )
    return [
        dict(zip(of, map(float, v), strict=True)) for of, v in zip(rewards, values, strict=True)
    ]
