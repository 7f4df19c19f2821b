"""Identity by content: every id is a hash of what it names, never of a clock or an attempt.

Hashes are BLAKE2b over length-prefixed fields, so no two field lists can collide by joining.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from infra.contracts.records import Message, Prompt

ID_BYTES = 16


def content_id(kind: str, *fields: str | bytes | int) -> str:
    """Return 32 hex digits that name these fields; ``kind`` keeps id families apart."""
    digest = hashlib.blake2b(digest_size=ID_BYTES, person=kind.encode()[:16])
    for item in fields:
        data = item if isinstance(item, bytes) else str(item).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def prompt_id(messages: Iterable[Message], source: str) -> str:
    """Name a task by what the model sees and where it came from."""
    parts = [part for m in messages for part in (m.role, m.content)]
    return content_id("prompt", source, *parts)


def prompt_revision(prompt: Prompt) -> str:
    """Name a task with its gold: correcting an answer changes this, not the ``prompt_id``."""
    metadata = [part for key in sorted(prompt.metadata) for part in (key, prompt.metadata[key])]
    answer = ["gold", prompt.answer] if prompt.answer is not None else ["no gold"]
    return content_id(
        "revision",
        prompt_id(prompt.messages, prompt.source),
        *answer,
        len(prompt.tests),
        *prompt.tests,
        *metadata,
    )


def group_id(run: str, prompt: str, admission_index: int) -> str:
    return content_id("group", run, prompt, admission_index)


def rollout_id(
    group: str, sample_index: int, response_ids: np.ndarray, weights: Iterable[tuple[int, str]]
) -> str:
    """Name one sampled trajectory: its slot, what was sampled, and from which weights."""
    ids = np.ascontiguousarray(response_ids, dtype="<i4").tobytes()
    return content_id("rollout", group, sample_index, ids, *(digest for _, digest in weights))


def group_seed(run_seed: int, group: str) -> int:
    """Seed of a group: 63 bits from the run's seed and the group id, the same for any attempt."""
    return int(content_id("seed", run_seed, group)[:16], 16) >> 1


def sample_seed(seed: int, sample_index: int) -> int:
    """Seed of one sample (31 bits, what a JAX key takes)."""
    return int(content_id("sample", seed, sample_index)[:8], 16) >> 1
