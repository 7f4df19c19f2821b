"""What a reply must keep before anyone believes it."""

from __future__ import annotations

import numpy as np

from infra.contracts.errors import InferenceError
from infra.contracts.records import GenerateReply, Sample

PER_TOKEN = ("response_ids", "behaviour_logprobs", "raw_logprobs", "policy_versions")


def is_text_alone(reply: GenerateReply) -> bool:
    """True for a reply of a foreign engine that told no ids, log-probs or versions."""
    return reply.prompt_ids is None


def loss_mask_of(sample: Sample) -> np.ndarray:
    """False where a token was forced; of a sample with ids."""
    if sample.loss_mask is None:
        return np.ones(len(sample.response_ids), bool)
    return np.asarray(sample.loss_mask, bool)


def check_reply(reply: GenerateReply, *, samples: int, min_version: int) -> None:
    """Check a reply against what was asked.

    Raises:
        InferenceError: not retryable; the reply breaks the protocol (number of samples, array
            lengths, versions below ``min_version`` or without a digest, log-probs not finite, ids
            in some places only).
    """
    if len(reply.samples) != samples:
        raise _broken(f"{len(reply.samples)} samples, {samples} were asked for")
    for index, sample in enumerate(reply.samples):
        absent = [name for name in PER_TOKEN if getattr(sample, name) is None]
        if len(absent) != (len(PER_TOKEN) if is_text_alone(reply) else 0):
            what = ", ".join(absent) or "prompt_ids"
            raise _broken(f"sample {index}: {what} missing; ids are optional only as a whole")
    if is_text_alone(reply):
        for version, _ in reply.weights:
            if version < min_version:
                raise _broken(f"version {version} is below the {min_version} asked")
        return
    if not reply.weights:
        raise _broken("no weights named")
    for index, sample in enumerate(reply.samples):
        _check_sample(reply, index, sample, min_version)


def versions_of(reply: GenerateReply, sample: Sample) -> list[int]:
    """The versions that sampled it, oldest first; one also where there is no token."""
    return sorted(set(np.asarray(sample.policy_versions).tolist())) or [reply.weights[0][0]]


def _check_sample(reply: GenerateReply, index: int, sample: Sample, min_version: int) -> None:
    tokens = len(sample.response_ids)
    for name in PER_TOKEN[1:]:
        shape = np.shape(getattr(sample, name))
        if shape != (tokens,):
            raise _broken(f"sample {index}: {name} has shape {shape}, {tokens} tokens")
    mask = sample.loss_mask
    if mask is not None and (np.shape(mask) != (tokens,) or np.asarray(mask).dtype != bool):
        raise _broken(f"sample {index}: loss_mask is not a flag for each of {tokens} tokens")
    for name in ("behaviour_logprobs", "raw_logprobs"):
        if not np.isfinite(getattr(sample, name)).all():
            raise _broken(f"sample {index}: {name} is not finite everywhere")
    used = versions_of(reply, sample)
    if used[0] < min_version:
        raise _broken(f"sample {index}: version {used[0]} is below the {min_version} asked")
    unnamed = set(used) - {version for version, _ in reply.weights}
    if unnamed:
        raise _broken(f"sample {index}: version {min(unnamed)} is not among the named weights")


def _broken(what: str) -> InferenceError:
    return InferenceError(f"the worker's reply breaks the protocol: {what}", retryable=False)
