"""What ``headrace run`` prints at the end: before and after, a few rollouts, where things lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.storage import run_layout
from pipelines.launcher.live_table import duration
from pipelines.launcher.sample_rollouts import SampleRollout, printable

MEANING = {
    "updates_reached": "all updates done",
    "target_pass_rate": "the target pass rate is reached",
    "wall_secs": "the wall time is used up",
    "drained": "drained as asked",
    "prompts_exhausted": "no prompts are left",
    "no_trainable_groups": "group after group was untrainable: the task is too hard, too easy, or "
    "the scorer is wrong",
    "no_progress": "nothing moved for too long",
    "interrupted": "interrupted; the same command goes on",
    "failed": "a role failed for good",
}


def closing_words(
    summary: dict[str, Any], samples: Sequence[SampleRollout], location: str, folder: Path
) -> str:
    """Return the last words of a session, safe for a terminal.

    Args:
        location: of the run, as commands take it.
        folder: of this machine, where the logs are.
    """
    counts = summary["audit"]
    ends = ("trained", "rejected", "failed", "dropped", "waiting", "in_flight")
    placed = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in ends)
    lines = [
        "",
        f"{summary['name']}: {MEANING.get(summary['stop_reason'], summary['stop_reason'])}",
        f"  updates    {summary['updates']} in {duration(summary['wall_seconds'])}",
        f"  before     {rate(summary, 'before')}",
        f"  after      {rate(summary, 'after')}",
        f"  groups     {counts['admitted']} admitted = {placed}"
        f" (lost {counts['lost']}, twice {counts['twice']})",
    ]
    if summary["idle_share"]:
        shares = (f"{role} {share:.0%}" for role, share in sorted(summary["idle_share"].items()))
        lines.append(f"  idle       {', '.join(shares)}")
    if samples:
        lines += ["", "Rollouts of the last step:"]
    for sample in samples:
        head = f"  [{sample.verdict or 'unscored'} {sample.reward:+.2f}]"
        prompt = printable(sample.prompt[-400:], 400)
        lines.append(f"{head} {prompt} → {printable(sample.response, 200)}")
        if sample.answer and sample.verdict != "pass":
            lines.append(f"      expected {printable(sample.answer, 100)}")
    lines += [
        "",
        f"  report     {location}/{run_layout.REPORT}",
        f"  summary    {location}/{run_layout.SUMMARY}",
        f"  logs       {folder / run_layout.LOGS}",
        "",
        "Next:",
        f"  headrace audit {location}       where every admitted group is",
        f"  headrace shards {location}      what was generated",
        f"  headrace weights {location}     the versions; export one as a Hugging Face folder",
    ]
    if summary["stop_reason"] in ("updates_reached", "wall_secs", "target_pass_rate"):
        more = 2 * max(summary["updates"], 1)
        lines.append(f"  headrace run {location} --set stop.updates={more}      go on")
    return "\n".join(lines)


def rate(summary: dict[str, Any], when: str) -> str:
    """Return one evaluation in words, e.g. ``25.0 % of 96 held-out (95 % interval 17 to 35 %)``."""
    value, interval = summary[f"pass_rate_{when}"], summary[f"interval_{when}"]
    if value is None:
        return "not evaluated"
    text = (
        f"{value:6.1%} of {summary['held_out_problems']} held-out prompts, greedy "
        f"(95 % interval {interval[0]:.0%} to {interval[1]:.0%})"
    )
    sampled = summary[f"pass_at_k_{when}"]
    if sampled:
        listed = ", ".join(f"pass@{k} {sampled[k]:.1%}" for k in sorted(sampled, key=int))
        text += f"; sampled {listed}"
    return text
