"""Groups for benchmarks: random ids and log-probs, as poor to compress as real ones."""

from __future__ import annotations

import numpy as np

from infra.contracts import ids
from infra.contracts.records import (
    Decision,
    FinishReason,
    Group,
    Judgement,
    Message,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Verdict,
)

RECIPE = "recipe"


def make_group(index: int, n: int, tokens: int) -> Group:
    """Group ``index`` of ``n`` rollouts of ``tokens`` tokens, judged and accepted."""
    prompt = Prompt(
        messages=(Message(role="user", content=f"What is {index} + 1?"),),
        source="bench",
        answer=str(index + 1),
    )
    name = ids.prompt_id(prompt.messages, prompt.source)
    group = ids.group_id("bench", name, index)
    rollouts = tuple(_rollout(index, sample, group, name, prompt, n, tokens) for sample in range(n))
    judgements = tuple(_judgement(rollout.rollout_id, i % 2) for i, rollout in enumerate(rollouts))
    return Group(
        run="bench",
        group_id=group,
        admission_index=index,
        prompt_id=name,
        prompt_revision=ids.prompt_revision(prompt),
        prompt=prompt,
        attempt=1,
        min_version=0,
        rollouts=rollouts,
        judgements=judgements,
        decision=Decision.ACCEPTED,
        reason="",
        error="",
        timings={"generate": 0.5},
    )


def _rollout(
    index: int, sample: int, group: str, name: str, prompt: Prompt, n: int, tokens: int
) -> Rollout:
    random = np.random.default_rng((index, sample))
    response = random.integers(0, 49_152, tokens, dtype=np.int32)
    logprobs = -random.random(tokens, dtype=np.float32)
    weights = ((0, "weights-0"),)
    return Rollout(
        rollout_id=ids.rollout_id(group, sample, response, weights),
        run="bench",
        prompt_id=name,
        prompt_revision=ids.prompt_revision(prompt),
        group_id=group,
        admission_index=index,
        sample_index=sample,
        seed=index,
        prompt_ids=random.integers(0, 49_152, 64, dtype=np.int32),
        response_ids=response,
        response_text=" ".join(map(str, response)),
        loss_mask=np.ones(tokens, bool),
        behaviour_logprobs=logprobs,
        raw_logprobs=logprobs,
        policy_versions=np.zeros(tokens, np.int32),
        weights=weights,
        spans=((0, tokens, "model", "stop"),),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(n=n, max_new_tokens=tokens),
        engine="bench",
        engine_dtype="float32",
        tokenizer_digest="tokenizer",
    )


def _judgement(rollout_id: str, reward: int) -> Judgement:
    score = Score(
        scorer="exact_answer@1",
        settings_digest="settings",
        verdict=Verdict.PASS if reward else Verdict.FAIL,
        value=float(reward),
    )
    return Judgement(
        rollout_id=rollout_id,
        scores=(score,),
        reward=float(reward),
        task_reward=float(reward),
        trainable=True,
        recipe_digest=RECIPE,
    )
