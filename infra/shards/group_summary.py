"""What a manifest says of a group, and what a writer demands of it: pure functions on records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from infra.contracts.manifests import GroupEntry
from infra.contracts.records import Decision, Group, Rollout, Verdict

SCORABLE, TRAINABLE = "scorable", "trainable"

_WHOLE = (
    "prompt_ids",
    "response_ids",
    "loss_mask",
    "behaviour_logprobs",
    "raw_logprobs",
    "policy_versions",
)
"""Optional only as a whole: a foreign rollout has none of them."""
_PER_TOKEN = _WHOLE[1:]
_LOGPROBS = ("behaviour_logprobs", "raw_logprobs")


def summarise(group: Group) -> GroupEntry:
    """Return the manifest's entry of a group; the order of its judgements does not matter."""
    oldest, newest = _version_range(group)
    first_verdicts = [j.scores[0].verdict for j in group.judgements if j.scores]
    passed = sum(verdict is Verdict.PASS for verdict in first_verdicts)
    rewards = [judgement.reward for judgement in group.judgements]
    return GroupEntry(
        group_id=group.group_id,
        admission_index=group.admission_index,
        prompt_id=group.prompt_id,
        rollouts=len(group.rollouts),
        oldest_version=oldest,
        newest_version=newest,
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else 0.0,
        pass_rate=passed / len(group.rollouts) if group.rollouts else 0.0,
        tokens=int(np.count_nonzero(_joined(group.rollouts, "loss_mask"))),
        reason=group.reason,
    )


def _version_range(group: Group) -> tuple[int, int]:
    sampled = _joined(group.rollouts, "policy_versions")
    named = [version for r in group.rollouts for version, _ in r.weights if not _has_tokens(r)]
    if sampled.size:
        named += [int(sampled.min()), int(sampled.max())]
    named = named or [group.min_version]
    return min(named), max(named)


def _has_tokens(rollout: Rollout) -> bool:
    return rollout.policy_versions is not None and rollout.policy_versions.size > 0


def _joined(rollouts: Iterable[Rollout], *names: str) -> np.ndarray:
    """Columns of all rollouts end to end: one numpy call per group instead of one per rollout."""
    columns = [getattr(rollout, name) for rollout in rollouts for name in names]
    present = [column for column in columns if column is not None]
    return np.concatenate(present) if present else np.empty(0)


def capabilities(groups: Sequence[Group]) -> tuple[str, ...]:
    """``scorable``: there are rollouts (text is in all); ``trainable``: all have ids, log-probs."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return ()
    trainable = all(r.response_ids is not None for r in rollouts) and _all_finite(rollouts)
    return (SCORABLE, TRAINABLE) if trainable else (SCORABLE,)


def _all_finite(rollouts: Sequence[Rollout]) -> bool:
    return bool(np.isfinite(_joined(rollouts, *_LOGPROBS)).all())


def check_group(group: Group, recipe_digest: str) -> list[str]:
    """Return why a group must not be committed, each problem with the id it is about."""
    problems = [
        f"judgement of {j.rollout_id}: recipe {j.recipe_digest}, the shard's is {recipe_digest}"
        for j in group.judgements
        if j.recipe_digest != recipe_digest
    ]
    if group.decision is None:
        problems.append(f"group {group.group_id}: has no decision yet")
    if group.decision is Decision.ACCEPTED and not (
        group.rollouts and len(group.judgements) == len(group.rollouts)
    ):
        problems.append(
            f"group {group.group_id}: accepted with {len(group.rollouts)} rollouts and "
            f"{len(group.judgements)} judgements; every rollout needs one"
        )
    for judgement in group.judgements:
        numbers = (judgement.reward, judgement.task_reward, judgement.weight)
        if not all(map(math.isfinite, numbers)):
            problems.append(f"judgement of {judgement.rollout_id}: reward or weight is not finite")
    for rollout in group.rollouts:
        problems += [f"rollout {rollout.rollout_id}: {p}" for p in _check_rollout(rollout)]
    # A failure may well be *that* the log-probs are NaN: it is recorded as it is.
    if group.decision is not Decision.FAILED and not _all_finite(group.rollouts):
        problems += [
            f"rollout {rollout.rollout_id}: {name} is not finite everywhere"
            for rollout in group.rollouts
            for name in _LOGPROBS
            if not np.isfinite(_joined([rollout], name)).all()
        ]
    return problems


def _check_rollout(rollout: Rollout) -> list[str]:
    absent = [name for name in _WHOLE if getattr(rollout, name) is None]
    if len(absent) == len(_WHOLE):
        return ["token_columns without ids"] if rollout.token_columns else []
    if absent:
        return [f"{', '.join(absent)} missing; ids and log-probs are optional only as a whole"]
    columns = {name: getattr(rollout, name) for name in _PER_TOKEN} | rollout.token_columns
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        return ["array lengths differ: " + ", ".join(f"{k} {n}" for k, n in lengths.items())]
    length = len(rollout.response_ids)  # type: ignore[arg-type]
    outside = [s for s in rollout.spans if not 0 <= s[0] <= s[1] <= length]
    return [f"span {outside[0]} is outside the {length} tokens"] if outside else []
