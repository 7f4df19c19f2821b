"""kill -9 every role once in one run: it goes on, and no group is lost or trained twice."""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.running import account, latest_version, pids, start, summary, wait_until

ROLES = ("worker", "rollouts-0", "controller", "trainer")


@pytest.mark.slow
def test_kill_minus_nine_of_each_role(tmp_path):
    run_dir = tmp_path / "run"
    process = start(
        "examples/tiny.toml",
        run_dir,
        "stop.updates=30",
        "warm_start.target=0.05",
        "admission.lease_secs=20.0",
        "evaluation.problems=16",
    )
    try:
        for count, role in enumerate(ROLES, start=1):
            wait_until(process, lambda n=count: latest_version(run_dir) >= 4 * n, 240)
            os.kill(pids(run_dir)[role], signal.SIGKILL)
        assert process.wait(timeout=240) == 0, (tmp_path / "run.log").read_text()[-4000:]
    finally:
        process.kill()

    result = account(run_dir)
    assert result.lost == result.twice == result.in_flight == 0
    ends = result.trained + result.rejected + result.failed + result.dropped + result.waiting
    assert result.admitted == ends
    assert summary(run_dir)["updates"] == 30
