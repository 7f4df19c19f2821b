"""A few rollouts of the newest trained step, to look at: some that passed, some that did not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from infra.contracts.errors import DamagedObject
from infra.contracts.records import Decision, Group, Verdict
from infra.ledger.ledger import entries_after
from infra.shards.shard_index import ShardIndex
from infra.shards.shard_reader import read_shard
from infra.storage.object_store import ObjectStore

SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class SampleRollout:
    """One rollout as a person reads it. Prompt and response are hostile text: escape them."""

    prompt: str
    response: str
    answer: str
    reward: float
    verdict: str
    explanation: str
    version: int
    finish_reason: str


def read_samples(store: ObjectStore, count: int = SAMPLES) -> tuple[SampleRollout, ...]:
    """Return up to ``count`` rollouts of the newest ledger step, one a group first."""
    entries = entries_after(store, 0)
    if not entries:
        return ()
    index = ShardIndex(store, decisions=(Decision.ACCEPTED,))
    manifests = {manifest.data_digest: manifest for manifest in index.poll()}
    groups: list[Group] = []
    for group_id, digest in entries[-1].groups[:count]:
        with contextlib.suppress(DamagedObject):  # quarantined by now: there are others to show
            found = read_shard(store, manifests[digest])
            groups += [group for group in found if group.group_id == group_id]
    return pick_samples(groups, count)


def pick_samples(groups: Iterable[Group], count: int) -> tuple[SampleRollout, ...]:
    """Take turns among the groups, and in each between passed and other rollouts."""
    queues = []
    for i, group in enumerate(groups):
        views = list(_views(group))
        good = [view for view in views if view.verdict == Verdict.PASS]
        bad = [view for view in views if view.verdict != Verdict.PASS]
        first, second = (good, bad) if i % 2 == 0 else (bad, good)
        queues.append([v for pair in _interleave(first, second) for v in pair])
    turns = max(map(len, queues), default=0)
    flat = [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]
    return tuple(flat[:count])


def _interleave(first: list, second: list) -> Iterable[list]:
    return (first[i : i + 1] + second[i : i + 1] for i in range(max(len(first), len(second))))


def _views(group: Group) -> Iterable[SampleRollout]:
    judged = {judgement.rollout_id: judgement for judgement in group.judgements}
    for rollout in group.rollouts:
        judgement = judged[rollout.rollout_id]
        score = judgement.scores[0] if judgement.scores else None
        yield SampleRollout(
            prompt="\n".join(message.content for message in group.prompt.messages),
            response=rollout.response_text,
            answer=group.prompt.answer or "",
            reward=judgement.reward,
            verdict=score.verdict.value if score else "",
            explanation=score.explanation if score else "",
            version=rollout.min_version,
            finish_reason=rollout.finish_reason.value,
        )


def printable(text: str, width: int = 0) -> str:
    """Return model text that cannot move the cursor or colour a terminal: escapes are shown.

    >>> printable("2+2=\\x1b[31m4\\n")
    '2+2=\\\\x1b[31m4\\\\n'
    """
    shown = "".join(map(_visible, text))
    return shown if not width or len(shown) <= width else shown[: width - 1] + "…"


def readable(text: str) -> str:
    """Return text as it is laid out, with whatever else cannot be seen shown as an escape."""
    return "".join(c if c in "\n\t" else _visible(c) for c in text)


def _visible(c: str) -> str:
    return c if c.isprintable() else c.encode("unicode_escape").decode()
