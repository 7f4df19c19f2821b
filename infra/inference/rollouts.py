"""From a task to a request, and from a reply to a group: pure functions, no Beam.

A reply is checked before it becomes facts; one that breaks the protocol is an ``InferenceError``
and its group a failure, which is data.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from infra.contracts import ids
from infra.contracts.errors import InferenceError
from infra.contracts.records import (
    Decision,
    GenerateReply,
    GenerateRequest,
    Group,
    GroupTask,
    Rollout,
    Sample,
)

ERROR_CHARS = 2_000


def request_for(task: GroupTask, timeout_secs: float) -> GenerateRequest:
    """Ask for all samples of a group. A re-issued task repeats the request id, so it can join."""
    return GenerateRequest(
        request_id=ids.content_id("request", task.group_id, task.min_version),
        messages=task.prompt.messages,
        sampling=task.sampling,
        seeds=tuple(ids.sample_seed(task.seed, i) for i in range(task.sampling.n)),
        min_version=task.min_version,
        timeout_secs=timeout_secs,
    )


def rollouts_from_reply(task: GroupTask, reply: GenerateReply) -> tuple[Rollout, ...]:
    """Turn a reply into the rollouts of its task.

    Raises:
        InferenceError: not retryable; the reply breaks the protocol (number of samples, array
            lengths, versions below ``min_version`` or without a digest, log-probs not finite).
    """
    if len(reply.samples) != task.sampling.n:
        raise _broken(f"{len(reply.samples)} samples, {task.sampling.n} were asked for")
    if not reply.weights:
        raise _broken("no weights named")
    digests = dict(reply.weights)
    return tuple(
        _rollout(task, reply, i, sample, digests) for i, sample in enumerate(reply.samples)
    )


def group_of(task: GroupTask, rollouts: tuple[Rollout, ...], **timings: float) -> Group:
    """Build the group of a task, not yet judged."""
    return Group(
        run=task.run,
        group_id=task.group_id,
        admission_index=task.admission_index,
        prompt_id=task.prompt_id,
        prompt_revision=task.prompt_revision,
        prompt=task.prompt,
        attempt=task.attempt,
        min_version=task.min_version,
        rollouts=rollouts,
        timings=timings,
    )


def failed_group(task: GroupTask, reason: str, error: Exception, **timings: float) -> Group:
    """Build the dead letter of a task: a group without rollouts that says what went wrong."""
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
    return dataclasses.replace(
        group_of(task, (), **timings),
        decision=Decision.FAILED,
        reason=reason,
        error=text[:ERROR_CHARS],
    )


def _rollout(
    task: GroupTask, reply: GenerateReply, index: int, sample: Sample, digests: dict[int, str]
) -> Rollout:
    tokens = len(sample.response_ids)
    versions = np.asarray(sample.policy_versions, np.int32)
    columns = {
        "behaviour_logprobs": np.asarray(sample.behaviour_logprobs, np.float32),
        "raw_logprobs": np.asarray(sample.raw_logprobs, np.float32),
    }
    for name, column in (*columns.items(), ("policy_versions", versions)):
        if column.shape != (tokens,):
            raise _broken(f"sample {index}: {name} has shape {column.shape}, {tokens} tokens")
    for name, column in columns.items():
        if not np.isfinite(column).all():
            raise _broken(f"sample {index}: {name} is not finite everywhere")
    used = sorted(set(versions.tolist())) or [reply.weights[0][0]]
    if used[0] < task.min_version:
        raise _broken(f"sample {index}: version {used[0]} is below the {task.min_version} asked")
    unnamed = [version for version in used if version not in digests]
    if unnamed:
        raise _broken(f"sample {index}: version {unnamed[0]} is not among the named weights")
    weights = tuple((version, digests[version]) for version in used)
    response = np.asarray(sample.response_ids, np.int32)
    return Rollout(
        rollout_id=ids.rollout_id(task.group_id, index, response, weights),
        run=task.run,
        prompt_id=task.prompt_id,
        prompt_revision=task.prompt_revision,
        group_id=task.group_id,
        admission_index=task.admission_index,
        sample_index=index,
        seed=ids.sample_seed(task.seed, index),
        prompt_ids=np.asarray(reply.prompt_ids, np.int32),
        response_ids=response,
        # A lone surrogate is legal in JSON and cannot be stored; ids stay the truth.
        response_text=sample.response_text.encode("utf-8", "replace").decode(),
        loss_mask=np.ones(tokens, bool),
        **columns,
        policy_versions=versions,
        weights=weights,
        spans=((0, tokens, "model", sample.finish_reason.value),),
        finish_reason=sample.finish_reason,
        sampling=task.sampling,
        engine=reply.engine,
        engine_dtype=reply.dtype,
        tokenizer_digest=reply.tokenizer_digest,
    )


def _broken(what: str) -> InferenceError:
    return InferenceError(f"the worker's reply breaks the protocol: {what}", retryable=False)
