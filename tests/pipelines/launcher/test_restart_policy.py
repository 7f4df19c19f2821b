from __future__ import annotations

import pytest

from pipelines.launcher.restart_policy import Action, RestartPolicy, judge_exit

POLICY = RestartPolicy(max_restarts=3, window_secs=100, backoff_secs=1, longest_backoff_secs=3)


@pytest.mark.parametrize(
    ("code", "ends_by_itself", "restarts", "action", "delay"),
    [
        (0, True, (), Action.FINISHED, 0),
        (0, False, (), Action.RESTART, 1),
        (-9, True, (), Action.RESTART, 1),
        (1, True, (990.0,), Action.RESTART, 2),
        (1, True, (990.0, 995.0), Action.RESTART, 3),  # 4, but at most 3
        (76, True, (), Action.RESTART, 1),  # preempted: saved, goes on
        (75, True, (), Action.GIVE_UP, 0),  # fenced
        (2, True, (), Action.GIVE_UP, 0),  # configuration
        (1, True, (980.0, 990.0, 995.0), Action.GIVE_UP, 0),
        (1, True, (800.0, 990.0, 995.0), Action.RESTART, 3),  # one is too long ago to count
        (0, True, (980.0, 990.0, 995.0), Action.FINISHED, 0),
    ],
)
def test_judge_exit(code, ends_by_itself, restarts, action, delay):
    verdict = judge_exit(
        POLICY, exit_code=code, ends_by_itself=ends_by_itself, restarts=restarts, now=1000.0
    )
    assert (verdict.action, verdict.delay_secs) == (action, delay)
    assert bool(verdict.why) == (action is not Action.FINISHED)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "killed by signal 9"),
        (2, "refused its configuration (exit code 2)"),
        (4, "failed with exit code 4"),
    ],
)
def test_the_end_is_described(code, words):
    verdict = judge_exit(POLICY, exit_code=code, ends_by_itself=False, restarts=(), now=0.0)
    assert verdict.why == words


@pytest.mark.parametrize(
    ("code", "action"),
    [(1, Action.GIVE_UP), (-9, Action.RESTART), (76, Action.GIVE_UP), (0, Action.FINISHED)],
)
def test_work_that_is_not_repeatable(code, action):
    verdict = judge_exit(
        POLICY, exit_code=code, ends_by_itself=True, repeatable=False, restarts=(), now=0.0
    )
    assert verdict.action is action
