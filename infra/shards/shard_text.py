"""Shards and groups for a person at a terminal. What a model wrote never reaches it unescaped."""

from __future__ import annotations

from collections.abc import Sequence

from infra.contracts.manifests import ShardManifest
from infra.contracts.records import Group, Judgement, Rollout


def printable(text: str) -> str:
    r"""Escape whatever could steer a terminal: control characters, also of direction.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def quoted(text: str, indent: str = "    | ") -> list[str]:
    """Text over several lines, each marked as quotation; line breaks are kept, the rest escaped."""
    return [indent + printable(line) for line in text.split("\n")]


def manifest_table(manifests: Sequence[ShardManifest]) -> str:
    """One line per shard."""
    header = (
        "decision",
        "block",
        "shard",
        "groups",
        "rows",
        "versions",
        "reward",
        "pass",
        "tokens",
    )
    rows = [header]
    for m in manifests:
        count = max(len(m.groups), 1)
        rows.append(
            (
                m.decision.value,
                f"{m.block:08d}",
                m.data_digest[:12],
                str(len(m.groups)),
                str(m.rows),
                f"{m.oldest_version}..{m.newest_version}",
                f"{sum(g.reward_mean for g in m.groups) / count:.3f}",
                f"{sum(g.pass_rate for g in m.groups) / count:.3f}",
                str(sum(g.tokens for g in m.groups)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def group_text(group: Group, only_rollout: str = "") -> str:
    """A group with its rollouts (or only those whose id starts so), scores and explanations."""
    decision = group.decision.value if group.decision else "undecided"
    lines = [
        f"group {group.group_id}  index {group.admission_index}  {decision}"
        + (f"  reason {printable(group.reason)}" if group.reason else "")
    ]
    if group.error:
        lines.append(f"  error: {printable(group.error)}")
    for message in group.prompt.messages:
        lines += [f"  {printable(message.role)}:", *quoted(message.content)]
    if group.prompt.answer is not None:
        lines.append(f"  reference answer: {printable(group.prompt.answer)}")
    judgements = {judgement.rollout_id: judgement for judgement in group.judgements}
    for rollout in group.rollouts:
        if rollout.rollout_id.startswith(only_rollout):
            lines += _rollout_lines(rollout, judgements.get(rollout.rollout_id))
    return "\n".join(lines)


def _rollout_lines(rollout: Rollout, judgement: Judgement | None) -> list[str]:
    facts = [f"  rollout {rollout.sample_index}  {rollout.rollout_id}"]
    if rollout.response_ids is not None:
        versions = sorted({version for version, _ in rollout.weights})
        facts.append(f"{len(rollout.response_ids)} tokens, version {', '.join(map(str, versions))}")
    facts.append(f"finish {rollout.finish_reason.value}")
    lines = ["  ".join(facts), *quoted(rollout.response_text)]
    if judgement is None:
        return [*lines, "    no judgement"]
    untrainable = "" if judgement.trainable else "  not trainable"
    lines.append(f"    reward {judgement.reward:g} (task {judgement.task_reward:g}){untrainable}")
    for score in judgement.scores:
        note = f": {printable(score.explanation)}" if score.explanation else ""
        lines.append(f"    {printable(score.scorer)} {score.verdict.value} {score.value:g}{note}")
    return lines
