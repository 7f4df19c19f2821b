"""``report.html``: one self-contained page with a run's curves, counts and rollouts.

Everything that a model or a data set wrote is escaped by jinja2; charts are SVG text drawn in
``report_charts``; the page holds no script and asks no network.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipelines.launcher.closing_words import MEANING, rate
from pipelines.launcher.live_table import duration
from pipelines.launcher.progress import StepFacts
from pipelines.launcher.report_charts import COLOURS, Series, line_chart, number, stacked_bars
from pipelines.launcher.sample_rollouts import SampleRollout, readable

SECONDS = "_secs"
PHASES = ("wait", "read", "ledger", "pack", "step", "checkpoint", "publish", "retire")
"""Of a trainer step, in order; others follow."""
AUDIT_WORDS = {
    "admitted": "prompts taken into the run",
    "trained": "consumed by a step",
    "rejected": "filtered out, with a reason",
    "failed": "no usable rollouts",
    "dropped": "too old when their turn came",
    "waiting": "ready, not consumed",
    "in_flight": "on their way",
    "lost": "nowhere (must be 0)",
    "twice": "consumed twice (must be 0)",
    "superseded": "further copies that do not count",
    "reissued": "published again after a lease ran out",
    "max_lag_seen": "largest lag of a consumed group",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of the page."""

    title: str
    note: str
    now: str
    """The newest value, beside the title."""
    svg: Markup
    legend: tuple[tuple[str, int], ...] = ()
    """(name, colour number)"""


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """Everything the page shows."""

    summary: Mapping[str, Any]
    steps: Sequence[StepFacts]
    trainer_rows: Sequence[Mapping[str, Any]]
    """Rows of the trainer's metrics, one per step; names ``room/stage/quantity_unit``."""
    samples: Sequence[SampleRollout]
    config: str
    """``run.toml`` as text."""
    lineage: Mapping[str, Any] | None = None


def render_report(facts: ReportFacts) -> str:
    """Return the page."""
    summary = facts.summary
    reasons = sorted(summary["reasons"].items(), key=lambda item: (-item[1], item[0]))
    return _template().render(
        summary=summary,
        meaning=MEANING.get(summary["stop_reason"], summary["stop_reason"]),
        before=rate(summary, "before"),
        after=rate(summary, "after"),
        wall=duration(summary["wall_seconds"]),
        charts=[chart for chart in charts(facts) if chart.svg],
        audit=[(name, summary["audit"][name], words) for name, words in AUDIT_WORDS.items()],
        reasons=reasons,
        samples=facts.samples,
        config=facts.config,
        lineage=facts.lineage,
    )


def charts(facts: ReportFacts) -> list[Chart]:
    """Return every figure, those without data with an empty drawing."""
    steps, rows = facts.steps, rows_by_step(facts.trainer_rows)
    named = functools.partial(_from_rows, rows)
    return [
        _pass_rate(facts),
        _line("Reward", "mean of a step's groups", [(s.step, s.reward) for s in steps]),
        _line("Loss", "", named("loss")),
        _line("Gradient norm", "before clipping", named("grad_norm"), include=(0.0,)),
        _gap(named("logprob_gap_mean"), named("logprob_gap_max")),
        _line(
            "Lag", "versions, largest of a step", [(s.step, s.lag) for s in steps], include=(0.0,)
        ),
        _line(
            "Sampled tokens",
            "per rollout",
            [(s.step, s.tokens / s.rollouts) for s in steps if s.rollouts],
            include=(0.0,),
        ),
        _phases(rows),
    ]


def rows_by_step(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Fold metric rows into one per step, by the last part of each name; a later row wins.

    >>> rows_by_step([{"at": 0.0, "trainer/step/version": 1, "trainer/step/loss": 0.5}])
    {1: {'loss': 0.5}}
    """
    folded: dict[int, dict[str, float]] = {}
    for row in rows:
        short = {name.rpartition("/")[2]: value for name, value in row.items() if name != "at"}
        step = short.pop("version", None)  # step N yields version N
        if step is None:
            continue
        values = {k: _mean(v) for k, v in short.items() if isinstance(v, int | float | Mapping)}
        folded.setdefault(int(_mean(step)), {}).update(values)
    return dict(sorted(folded.items()))


def _mean(value: Any) -> float:
    """A plain number, or the mean of a tally."""
    if isinstance(value, Mapping):
        return float(value["sum"]) / max(float(value["count"]), 1.0)
    return float(value)


def _from_rows(rows: Mapping[int, Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(step, row[name]) for step, row in rows.items() if name in row]


def _line(
    title: str, note: str, points: Sequence[tuple[float, float]], include: Sequence[float] = ()
) -> Chart:
    now = number(points[-1][1]) if points else ""
    svg = line_chart([Series(name=title, points=points)], include=include)
    return Chart(title=title, note=note, now=now, svg=svg)


def _pass_rate(facts: ReportFacts) -> Chart:
    """Training pass rate per step, with the two held-out evaluations and their intervals."""
    summary, steps = facts.summary, facts.steps
    ends = [("before", 0), ("after", summary["updates"])]
    found = [
        (x, summary[f"pass_rate_{when}"], *summary[f"interval_{when}"])
        for when, x in ends
        if summary[f"pass_rate_{when}"] is not None
    ]
    train = Series(name="training", points=[(s.step, s.pass_rate) for s in steps])
    held_out = Series(
        name="held out",
        points=[(x, value) for x, value, _, _ in found],
        whiskers=[(x, low, high) for x, _, low, high in found],
        marks_only=True,
    )
    return Chart(
        title="Pass rate",
        note="held out with its 95 % interval",
        now=f"{steps[-1].pass_rate:.0%}" if steps else "",
        svg=line_chart([train, held_out], include=(0.0, 1.0)),
        legend=(("training", 0), ("held out", 1)),
    )


def _gap(means: Sequence[tuple[float, float]], largest: Sequence[tuple[float, float]]) -> Chart:
    series = [Series(name="mean", points=means), Series(name="largest", points=largest)]
    return Chart(
        title="Log-prob gap",
        note="behaviour against trained policy, per token; grows with lag",
        now=number(means[-1][1]) if means else "",
        svg=line_chart([s for s in series if s.points], include=(0.0,)),
        legend=(("mean", 0), ("largest", 1)),
    )


def _phases(rows: Mapping[int, Mapping[str, float]]) -> Chart:
    """Seconds of each phase of a trainer step: waiting shows who waited for whom."""
    found = {n: None for row in rows.values() for n in row if n.endswith(SECONDS)}
    known = [phase + SECONDS for phase in PHASES if phase + SECONDS in found]
    names = list(dict.fromkeys([*known, *found]))
    steps = [step for step, row in rows.items() if any(name in row for name in names)]
    parts = {
        name.removesuffix(SECONDS): [max(rows[step].get(name, 0.0), 0.0) for step in steps]
        for name in names
    }
    total = sum(values[-1] for values in parts.values()) if steps else 0.0
    return Chart(
        title="Seconds per step",
        note="of the trainer, by phase",
        now=f"{total:.2f} s" if steps else "",
        svg=stacked_bars(steps, parts),
        legend=tuple((name.replace("_", " "), i % COLOURS) for i, name in enumerate(parts)),
    )


def _template() -> jinja2.Template:
    source = Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"number": number, "readable": readable}
    return environment.from_string(source)
