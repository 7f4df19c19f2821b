"""Sequences, groups and a model small enough for tests of the trainer."""

from __future__ import annotations

import dataclasses

import numpy as np

from infra.contracts import ids
from infra.contracts.records import Group, SamplingParams
from tests.builders import make_group, make_judgement
from trainer.credit import TrainingSequence
from trainer.model.config import ModelConfig

MODEL = ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, head_dim=8, ffn=32, vocab=14, max_len=64)


def make_sequences(
    seed: int, groups: int = 3, n: int = 3, *, prompt: int = 5, response: int = 6
) -> list[TrainingSequence]:
    """Groups of up to ``n`` responses; lengths, masks and log-probs drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(groups):
        prompt_ids = rng.integers(1, MODEL.vocab, rng.integers(1, prompt + 1)).astype(np.int32)
        for _ in range(rng.integers(1, n + 1)):
            size = int(rng.integers(0, response + 1))
            mask = rng.random(size) > 0.2
            noise = rng.normal(0, 0.3, (2, size)).astype(np.float32)
            out.append(
                TrainingSequence(
                    prompt_ids=prompt_ids,
                    # few tokens, so that equal responses and common beginnings occur
                    response_ids=rng.integers(1, 4, size).astype(np.int32),
                    loss_mask=mask,
                    raw_logprobs=-2.5 + noise[0],
                    behaviour_logprobs=-2.5 + noise[1],
                    temperature=float(rng.choice([0.7, 1.0])),
                    advantage=float(rng.normal()),
                    scale=float(rng.random() + 0.5),
                    max_new_tokens=response,
                )
            )
    return out


def make_training_group(
    index: int,
    *,
    version: int = 0,
    n: int = 4,
    rewards: list[float] | None = None,
    run: str = "test",
) -> Group:
    """A committed-looking group whose token ids fit ``MODEL``."""
    group = make_group(index, n=n, version=version, rewards=rewards, run=run)
    rng = np.random.default_rng(index)
    sampling = SamplingParams(n=n, max_new_tokens=4)
    rollouts, judgements = [], []
    for old, judgement in zip(group.rollouts, group.judgements, strict=True):
        response = rng.integers(1, MODEL.vocab, 3).astype(np.int32)
        name = ids.rollout_id(group.group_id, old.sample_index, response, old.weights)
        rollout = dataclasses.replace(
            old,
            rollout_id=name,
            prompt_ids=np.array([1, 2 + index % 8, 3], np.int32),
            response_ids=response,
            sampling=sampling,
        )
        rollouts.append(rollout)
        judgements.append(make_judgement(rollout, reward=judgement.reward))
    return dataclasses.replace(group, rollouts=tuple(rollouts), judgements=tuple(judgements))
