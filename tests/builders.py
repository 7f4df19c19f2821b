"""Small deterministic records for tests; every argument has a default that makes a valid record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infra.contracts import ids
from infra.contracts.records import (
    Decision,
    FinishReason,
    Group,
    GroupTask,
    Judgement,
    Message,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Verdict,
)

RUN = "test"
RECIPE = "recipe-digest"
REASONS = {
    Decision.ACCEPTED: "",
    Decision.REJECTED: "zero_variance",
    Decision.FAILED: "generation_failed",
}


def make_prompt(index: int = 0, *, answer: str | None = "", source: str = "tests") -> Prompt:
    """Prompt ``index``: ``<index> + 1 =`` with its right answer, unless one is given."""
    return Prompt(
        messages=(Message(role="user", content=f"{index} + 1 ="),),
        source=source,
        answer=str(index + 1) if answer == "" else answer,
    )


def make_group_id(index: int = 0, *, run: str = RUN) -> str:
    """Id of the group that ``make_group(index=index)`` builds."""
    prompt = make_prompt(index)
    return ids.group_id(run, ids.prompt_id(prompt.messages, prompt.source), index)


def make_task(
    index: int = 0,
    *,
    n: int = 2,
    version: int = 0,
    attempt: int = 1,
    run: str = RUN,
    prompt: Prompt | None = None,
    sampling: SamplingParams | None = None,
    epoch: int = 1,
    expires_at: float = 1e9,
) -> GroupTask:
    """The admission of prompt ``index`` at admission index ``index``."""
    prompt = prompt or make_prompt(index)
    name = ids.prompt_id(prompt.messages, prompt.source)
    group = ids.group_id(run, name, index)
    return GroupTask(
        run=run,
        group_id=group,
        admission_index=index,
        prompt_id=name,
        prompt_revision=ids.prompt_revision(prompt),
        prompt=prompt,
        sampling=sampling or SamplingParams(n=n, max_new_tokens=8),
        seed=ids.group_seed(0, group),
        min_version=version,
        attempt=attempt,
        epoch=epoch,
        expires_at=expires_at,
    )


def make_rollout(
    index: int = 0,
    sample: int = 0,
    *,
    n: int = 2,
    version: int = 0,
    tokens: int = 3,
    text: str | None = None,
    run: str = RUN,
) -> Rollout:
    """Sample ``sample`` of group ``index``: ``tokens`` ids, finite log-probs, one version."""
    task = make_task(index, n=n, version=version, run=run)
    response = (np.arange(tokens, dtype=np.int32) + 100 * index + 10 * sample + 1).astype(np.int32)
    logprobs = (-0.25 * (np.arange(tokens) + 1)).astype(np.float32)
    weights = ((version, f"weights-{version}"),)
    return Rollout(
        rollout_id=ids.rollout_id(task.group_id, sample, response, weights),
        run=run,
        prompt_id=task.prompt_id,
        prompt_revision=task.prompt_revision,
        group_id=task.group_id,
        admission_index=index,
        sample_index=sample,
        seed=ids.sample_seed(task.seed, sample),
        prompt_ids=np.array([1, 2 + index, 3], np.int32),
        response_ids=response,
        response_text=f" {index + sample + 1}" if text is None else text,
        loss_mask=np.ones(tokens, bool),
        behaviour_logprobs=logprobs,
        raw_logprobs=logprobs.copy(),
        policy_versions=np.full(tokens, version, np.int32),
        weights=weights,
        spans=((0, tokens, "model", "stop"),),
        finish_reason=FinishReason.STOP,
        sampling=task.sampling,
        engine="fake-1",
        engine_dtype="float32",
        tokenizer_digest="tokenizer-digest",
    )


def make_judgement(
    rollout: Rollout,
    *,
    reward: float = 1.0,
    trainable: bool = True,
    recipe_digest: str = RECIPE,
) -> Judgement:
    """One score of ``exact_answer``: ``pass`` when the reward is positive."""
    score = Score(
        scorer="exact_answer@1",
        settings_digest="settings",
        verdict=Verdict.PASS if reward > 0 else Verdict.FAIL,
        value=reward,
        components={"exact": reward},
        explanation="last number compared",
    )
    return Judgement(
        rollout_id=rollout.rollout_id,
        scores=(score,),
        reward=reward,
        task_reward=reward,
        trainable=trainable,
        recipe_digest=recipe_digest,
    )


def make_group(
    index: int = 0,
    *,
    decision: Decision | None = Decision.ACCEPTED,
    n: int | None = None,
    version: int = 0,
    tokens: int = 3,
    rewards: Sequence[float] | None = None,
    attempt: int = 1,
    run: str = RUN,
    recipe_digest: str = RECIPE,
) -> Group:
    """Group ``index``, judged and decided. A failed one has no rollouts unless ``n`` is given.

    Rewards default to 1, 0, 1, 0, ...; a rejected group's are all 0. ``decision=None`` gives the
    group as it leaves generation: rollouts without judgements.
    """
    if n is None:
        n = 0 if decision is Decision.FAILED else 2
    task = make_task(index, n=max(n, 1), version=version, run=run)
    rollouts = tuple(
        make_rollout(index, i, n=max(n, 1), version=version, tokens=tokens, run=run)
        for i in range(n)
    )
    if rewards is None:
        rewards = [float(i % 2 == 0 and decision is not Decision.REJECTED) for i in range(n)]
    judgements = tuple(
        make_judgement(rollout, reward=reward, recipe_digest=recipe_digest)
        for rollout, reward in zip(rollouts, rewards, strict=True)
    )
    return Group(
        run=run,
        group_id=task.group_id,
        admission_index=index,
        prompt_id=task.prompt_id,
        prompt_revision=task.prompt_revision,
        prompt=task.prompt,
        attempt=attempt,
        min_version=version,
        rollouts=rollouts,
        judgements=() if decision is None else judgements,
        decision=decision,
        reason=REASONS[decision] if decision else "",
        error="ConnectionError: no worker" if decision is Decision.FAILED else "",
        timings={"generate": 0.5},
    )
