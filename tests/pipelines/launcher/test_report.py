from __future__ import annotations

import re

import pytest

from infra.ledger.audit import Audit
from pipelines.launcher.closing_words import closing_words
from pipelines.launcher.launcher_state import Evaluation, LauncherState
from pipelines.launcher.progress import RunSnapshot, StepFacts
from pipelines.launcher.report import ReportFacts, render_report, rows_by_step
from pipelines.launcher.report_charts import Series, line_chart, number, stacked_bars, ticks
from pipelines.launcher.sample_rollouts import SampleRollout, pick_samples, printable
from pipelines.launcher.summary import build_summary
from tests.builders import make_group

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202eevil"
STEPS = tuple(
    StepFacts(
        step=i,
        at=100.0 + i,
        groups=2,
        rollouts=4,
        tokens=12,
        reward=i / 10,
        pass_rate=i / 10,
        lag=i % 2,
        dropped=0,
        violations=0,
    )
    for i in range(1, 6)
)
NUMBERS = ("admitted", "trained", "rejected", "failed", "dropped", "waiting", "in_flight")
AUDIT = Audit(
    **dict.fromkeys((*NUMBERS, "lost", "twice", "superseded", "reissued", "max_lag_seen"), 0)
)


def snapshot(**changes):
    values = {
        "version": 5,
        "steps": STEPS,
        "rollouts_per_sec": 1.0,
        "tokens_per_sec": 3.0,
        "secs_per_step": 1.0,
        "committed": {"rollouts": 10},
        "reasons": {HOSTILE: 3},
        "heartbeats": {"trainer": {"state": "stepping", "idle_share": 0.25}},
    }
    return RunSnapshot(**{**values, **changes})


def evaluation(version, passes):
    rate = passes / 10
    return Evaluation(
        version=version, problems=10, passes=passes, pass_rate=rate, interval=(rate / 2, rate)
    )


def summary(state=None, **changes):
    state = state or LauncherState(before=evaluation(0, 2), after=evaluation(5, 8))
    return build_summary(
        name=HOSTILE, state=state, snapshot=snapshot(**changes), audit=AUDIT, restarts={}
    )


def page(**changes):
    sample = SampleRollout(
        prompt=HOSTILE,
        response=HOSTILE,
        answer=HOSTILE,
        reward=0.0,
        verdict="fail",
        explanation=HOSTILE,
        version=1,
        finish_reason="stop",
    )
    rows = [{"at": 0.0, "trainer/step/version": 1, "trainer/step/<b>_secs": 1.0}]
    values = {
        "summary": summary(),
        "steps": STEPS,
        "trainer_rows": rows,
        "samples": (sample,),
        "config": HOSTILE,
        "lineage": {"parent": HOSTILE, "version": 1},
    }
    return render_report(ReportFacts(**{**values, **changes}))


def test_nothing_that_others_wrote_becomes_markup():
    text = page()
    assert "<script" not in text and "<b>_" not in text
    assert text.count("&lt;script&gt;alert(1)") == 9
    assert text.count("\\x1b[2J\\u202eevil") == 4  # prompt, response, answer, explanation
    # Self-contained: no address is ever asked, and the page forbids it to itself.
    assert not re.search(r"(?:src|href)=|url\(|@import", text)
    assert "default-src 'none'" in text


def test_a_run_that_trained_nothing_has_a_page_too():
    empty = summary(LauncherState(stop_reason="failed"), version=-1, steps=(), reasons={})
    text = page(summary=empty, steps=(), trainer_rows=(), samples=(), lineage=None)
    assert "No step was trained" in text and "not evaluated" in text


def test_the_last_words_cannot_move_the_cursor(tmp_path):
    words = closing_words(
        {**summary(), "name": "x", "reasons": {}}, pick_samples([], 5), "runs/x", tmp_path
    )
    assert "20.0% of 10 held-out" in words and "80.0% of 10 held-out" in words
    assert printable(HOSTILE) == "<script>alert(1)</script>\\x1b[2J\\u202eevil"
    assert printable("abcdef", 4) == "abc…"


def test_summary_of_an_interrupted_run():
    found = summary(LauncherState(before=evaluation(0, 2), wall_secs=12.3456, sessions=2))
    assert (found["pass_rate_before"], found["pass_rate_after"]) == (0.2, None)
    assert (found["updates"], found["wall_seconds"], found["sessions"]) == (5, 12.346, 2)
    assert found["idle_share"] == {"trainer": 0.25}
    assert found["rollouts_trained"] == 20


def test_unpublished_steps_are_not_counted():
    assert summary(version=3)["rollouts_trained"] == 12


def test_samples_take_turns():
    groups = [make_group(i, n=3) for i in range(3)]  # rewards 1, 0, 1
    picked = pick_samples(groups, 5)
    assert [s.verdict for s in picked] == ["pass", "fail", "pass", "fail", "pass"]
    assert [s.prompt for s in picked] == ["0 + 1 =", "1 + 1 =", "2 + 1 =", "0 + 1 =", "1 + 1 ="]


def test_rows_of_a_step_fold_and_the_later_wins():
    rows = [
        {"at": 1.0, "trainer/step/version": 2, "trainer/step/loss": 1.0},
        {"at": 2.0, "trainer/step/version": 2, "trainer/step/loss": 3.0},
        {"at": 3.0, "trainer/step/version": 1, "a/b": {"sum": 6.0, "count": 3, "min": 1, "max": 3}},
        {"at": 4.0, "other": 1.0},
        {"at": 5.0, "trainer/step/version": 1, "word": "text"},
    ]
    assert rows_by_step(rows) == {1: {"b": 2.0}, 2: {"loss": 3.0}}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 17, [0, 5, 10, 15]),
        (-0.03, 0.04, [-0.02, 0, 0.02, 0.04]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_charts_hold_odd_data():
    nan, inf = float("nan"), float("inf")
    flat = line_chart([Series(name="a", points=[(1, 2.0), (2, nan), (3, inf), (4, 2.0)])])
    assert flat.count("<circle") == 2 and "nan" not in flat and "inf" not in flat
    assert line_chart([Series(name="a", points=[])]) == ""
    many = line_chart([Series(name="a", points=[(i, float(i)) for i in range(5000)])])
    assert 100 < many.count("<circle") <= 240
    bars = stacked_bars([1, 2], {"<wait>": [1.0, 0.0], "step": [2.0, 1.0]})
    assert bars.count("<rect") == 3 and "<wait>" not in bars
    assert number(float("nan")) == "nan"
