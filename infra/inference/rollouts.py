"""From a task to a request, and from a reply to a group: pure functions, no Beam.

A reply is checked before it becomes facts; one that breaks the protocol is an ``InferenceError``
and its group a failure, which is data.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from infra.contracts import ids
from infra.contracts.records import (
    Decision,
    GenerateReply,
    GenerateRequest,
    Group,
    GroupTask,
    Rollout,
    Sample,
)
from infra.inference.reply_checks import (
    PER_TOKEN,
    check_reply,
    is_text_alone,
    loss_mask_of,
    versions_of,
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
        InferenceError: not retryable; the reply breaks the protocol (``reply_checks``).
    """
    check_reply(reply, samples=task.sampling.n, min_version=task.min_version)
    return tuple(_rollout(task, reply, i, sample) for i, sample in enumerate(reply.samples))


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


def _rollout(task: GroupTask, reply: GenerateReply, index: int, sample: Sample) -> Rollout:
    # A lone surrogate is legal in JSON and cannot be stored; ids stay the truth.
    text = sample.response_text.encode("utf-8", "replace").decode()
    if is_text_alone(reply):
        # Nobody knows the ids, so the text names it. Scorable, and nothing more.
        weights = reply.weights
        identity = np.frombuffer(text.encode(), np.uint8)
        facts = dict.fromkeys((*PER_TOKEN, "loss_mask"))
        spans = ()
    else:
        digests = dict(reply.weights)
        weights = tuple((version, digests[version]) for version in versions_of(reply, sample))
        identity = np.asarray(sample.response_ids, np.int32)
        facts = {
            "response_ids": identity,
            "loss_mask": loss_mask_of(sample),
            "behaviour_logprobs": np.asarray(sample.behaviour_logprobs, np.float32),
            "raw_logprobs": np.asarray(sample.raw_logprobs, np.float32),
            "policy_versions": np.asarray(sample.policy_versions, np.int32),
        }
        spans = ((0, len(identity), "model", sample.finish_reason.value),)
    return Rollout(
        rollout_id=ids.rollout_id(task.group_id, index, identity, weights),
        run=task.run,
        prompt_id=task.prompt_id,
        prompt_revision=task.prompt_revision,
        group_id=task.group_id,
        admission_index=task.admission_index,
        sample_index=index,
        seed=ids.sample_seed(task.seed, index),
        prompt_ids=None if reply.prompt_ids is None else np.asarray(reply.prompt_ids, np.int32),
        response_text=text,
        **facts,
        weights=weights,
        spans=spans,
        finish_reason=sample.finish_reason,
        sampling=task.sampling,
        engine=reply.engine,
        engine_dtype=reply.dtype,
        tokenizer_digest=reply.tokenizer_digest,
    )
