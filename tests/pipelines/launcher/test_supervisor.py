"""Real processes, a clock that only the test moves, and no sleeps: children speak through pipes."""

from __future__ import annotations

import os
import sys

import pytest

from infra.clock import ManualClock
from pipelines.launcher.restart_policy import RestartPolicy
from pipelines.launcher.role_process import RoleSpec, last_line
from pipelines.launcher.signal_waker import SignalWaker
from pipelines.launcher.supervisor import RoleFailed, Supervisor

POLICY = RestartPolicy(max_restarts=2, window_secs=100.0, backoff_secs=1.0)


@pytest.fixture
def waker():
    with SignalWaker() as waker:
        yield waker


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def deaths():
    return []


@pytest.fixture
def supervisor(tmp_path, clock, deaths, waker):
    supervisor = Supervisor(
        log_of=lambda role: tmp_path / f"{role}.log",
        policy=POLICY,
        clock=clock,
        on_death=lambda spec, verdict: deaths.append((spec.name, verdict.why)),
    )
    yield supervisor
    supervisor.stop(wait=waker.wait, hurry=lambda: True)


def role(code, name="worker", **settings):
    return RoleSpec(name=name, argv=(sys.executable, "-c", code), **settings)


def tend_until(supervisor, waker, done):
    while not done():
        waker.wait(30.0)  # returns when a child ends
        supervisor.tend()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_dead_role_is_started_again_after_its_delay(supervisor, waker, clock, deaths, tmp_path):
    marker = tmp_path / "second"
    code = f"import os, sys; os.path.exists({str(marker)!r}) or (open({str(marker)!r}, 'w'), 1/0)"
    supervisor.start(role(code))
    tend_until(supervisor, waker, lambda: supervisor.next_due() is not None)
    assert deaths == [("worker", "failed with exit code 1")]
    assert supervisor.next_due() == clock.now() + 1.0

    supervisor.tend()
    assert supervisor.pids == {}  # not yet
    clock.advance(1.0)
    supervisor.tend()
    tend_until(supervisor, waker, lambda: supervisor.finished("worker"))
    assert supervisor.restarts == {"worker": 1}


def test_a_role_that_keeps_dying_is_given_up(supervisor, waker, clock):
    supervisor.start(role("print('no gpu'); raise SystemExit(3)"))

    def tend_for_ever():
        clock.advance(10.0)
        supervisor.tend()
        return False

    with pytest.raises(RoleFailed, match=r"exit code 3, after 2 restarts .*: no gpu \(log: "):
        tend_until(supervisor, waker, tend_for_ever)


@pytest.mark.parametrize(
    ("code", "words"), [(75, "another incarnation has taken over"), (2, "refused its config")]
)
def test_fenced_and_misconfigured_roles_are_not_restarted(supervisor, waker, code, words):
    supervisor.start(role(f"import sys; sys.exit({code})"))
    with pytest.raises(RoleFailed, match=words) as failure:
        tend_until(supervisor, waker, lambda: False)
    assert failure.value.exit_code == code


def test_exit_code_0_of_a_role_that_serves_is_a_death(supervisor, waker, deaths):
    supervisor.start(role("pass", ends_by_itself=False))
    tend_until(supervisor, waker, lambda: deaths)
    assert deaths == [("worker", "ended without being asked (exit code 0)")]


def test_what_a_role_started_ends_with_it(supervisor, waker, deaths, tmp_path):
    """A grandchild that holds a pipe: its end is seen when it is gone."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    grandchild = f"import os, signal; os.open({str(fifo)!r}, os.O_WRONLY); signal.pause()"
    code = (
        "import subprocess, sys, os\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}])\n"
        f"os.open({str(fifo)!r}, os.O_WRONLY); os.kill(os.getpid(), 9)"
    )
    supervisor.start(role(code))
    tend_until(supervisor, waker, lambda: deaths)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_stop_asks_first_and_kills_later(supervisor, waker, tmp_path):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    code = (
        "import signal, sys\n"
        "signal.signal(15, {handler})\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "while True: signal.pause()"
    )
    deaf = code.replace("{handler}", "signal.SIG_IGN")
    said = code.replace("{handler}", "lambda *_: sys.exit(print('saved') or 76)")
    for name, code in (("deaf", deaf), ("trainer", said)):
        supervisor.start(role(code, name=name))
        assert ready.read_text() == ""  # its handler is installed
    pids = supervisor.pids
    polls = []

    def hurry():  # the second Ctrl-C comes once the polite one has left
        polls.append(gone(pids["trainer"]))
        return polls[-1]

    supervisor.stop(wait=lambda secs: waker.wait(0.05), hurry=hurry)
    assert all(gone(pid) for pid in pids.values())
    assert last_line(tmp_path / "trainer.log") == "saved"
    assert supervisor.pids == {}


def test_who_overstays_its_grace_is_killed(supervisor, waker, clock, tmp_path):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    code = (
        "import signal; signal.signal(15, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "while True: signal.pause()"
    )
    supervisor.start(role(code, grace_secs=3.0))
    assert ready.read_text() == ""
    (pid,) = supervisor.pids.values()
    waits = []

    def wait(secs):
        waits.append(secs)
        clock.advance(secs)

    supervisor.stop(wait=wait)
    assert waits == [3.0]
    assert gone(pid)


def test_stop_drops_a_restart_that_is_due(supervisor, waker, deaths):
    supervisor.start(role("raise SystemExit(1)"))
    tend_until(supervisor, waker, lambda: deaths)
    supervisor.stop(["worker"], wait=waker.wait)
    assert supervisor.next_due() is None


def test_output_of_a_job_stands_apart_from_its_log(supervisor, waker, tmp_path):
    code = "import sys; print('result'); print('noise', file=sys.stderr)"
    supervisor.start(role(code, name="job", output=tmp_path / "job.json"))
    tend_until(supervisor, waker, lambda: supervisor.finished("job"))
    assert (tmp_path / "job.json").read_text() == "result\n"
    assert last_line(tmp_path / "job.log") == "noise"
    assert last_line(tmp_path / "none.log") == ""
