"""Whole sessions with small programs as roles; the real ones are proved in ``end_to_end``."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.contracts.errors import ConfigError, HeadraceError
from infra.ledger.audit import audit
from infra.storage.local_store import LocalStore
from pipelines.launcher.launch import launch
from pipelines.launcher.restart_policy import RestartPolicy
from pipelines.launcher.role_commands import RoleCommands
from pipelines.launcher.session import NoProgress

FAKE = Path(__file__).with_name("fake_headrace.py")
ROOT = Path(__file__).parents[3]
CONFIG = """
[run]
name = "test"
[prompts]
source = "addition"
[recipe]
settings = {exact_answer = {extraction = ["first_line"]}}
[stop]
updates = 3
"""
QUICK = RestartPolicy(max_restarts=2, backoff_secs=0.01)
AUDIT_KEYS = {
    *("admitted", "trained", "rejected", "failed", "dropped", "waiting", "in_flight"),
    *("lost", "twice", "superseded", "reissued", "max_lag_seen"),
}


def fake(scenario: str = "") -> RoleCommands:
    return RoleCommands(headrace=(sys.executable, str(FAKE), scenario))


@pytest.fixture(autouse=True)
def _roles_find_the_repository(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def alive(tmp_path, monkeypatch):
    """A pipe that reaches its end when every child is gone."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    monkeypatch.setenv("ALIVE", str(fifo))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    yield reader
    os.close(reader)


def wait_until_all_are_gone(alive: int) -> None:
    os.set_blocking(alive, True)
    assert os.read(alive, 1) == b""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "test.toml"
    path.write_text(CONFIG)
    return path


def test_a_run_from_start_to_end_and_again(config, tmp_path, alive):
    out, run = io.StringIO(), tmp_path / "run"
    assert launch(config, run, commands=fake(), policy=QUICK, out=out) == 0
    wait_until_all_are_gone(alive)

    summary = json.loads((run / "summary.json").read_text())
    assert (summary["pass_rate_before"], summary["pass_rate_after"]) == (0.25, 1.0)
    assert (summary["updates"], summary["stop_reason"]) == (3, "updates_reached")
    assert set(summary["audit"]) == AUDIT_KEYS
    assert summary["audit"]["trained"] == summary["audit"]["admitted"] == 6
    assert summary["wall_seconds"] > 0
    assert "version 3" in out.getvalue() and str(run / "report.html") in out.getvalue()
    assert "<svg" in (run / "report.html").read_text()

    again = io.StringIO()
    assert launch(config, run, commands=fake(), out=again) == 0
    assert "complete" in again.getvalue() and "--set stop.updates=6" in again.getvalue()

    with pytest.raises(ConfigError, match=r"another configuration \(run\.seed: 0 -> 7\)"):
        launch(config, run, ["run.seed=7"], commands=fake())

    # More updates: only [stop] changes, so the run goes on, by its folder alone.
    assert launch(run, None, ["stop.updates=4"], commands=fake(), as_json=True, out=again) == 0
    longer = json.loads(again.getvalue().splitlines()[-1])
    assert (longer["updates"], longer["sessions"]) == (4, 2)
    assert longer["wall_seconds"] > summary["wall_seconds"]
    assert (run / "evaluated").read_text().split() == ["0", "3", "4"]


def test_dry_run_starts_and_writes_nothing(config, tmp_path, alive):
    out = io.StringIO()
    assert launch(config, tmp_path / "run", commands=fake(), dry_run=True, out=out) == 0
    wait_until_all_are_gone(alive)
    assert not (tmp_path / "run").exists()
    for words in ("[admission]\ngroups_per_step = 12", "2 pipeline processes", "disk  "):
        assert words in out.getvalue()


def test_killed_roles_are_started_again_and_the_target_drains(config, tmp_path, alive):
    run, out = tmp_path / "run", io.StringIO()
    overrides = ["stop.updates=8", "stop.target_pass_rate=0.5"]
    assert launch(config, run, overrides, commands=fake("accidents"), policy=QUICK, out=out) == 0
    wait_until_all_are_gone(alive)
    for role in ("trainer", "rollouts-0"):
        assert f"{role} killed by signal 9; starting it again" in out.getvalue()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == {"trainer": 1, "rollouts-0": 1}
    assert summary["stop_reason"] == "target_pass_rate"
    assert audit(LocalStore(run)).holds


def test_no_trainable_groups_is_a_bad_end(config, tmp_path, alive):
    run = tmp_path / "run"
    assert launch(config, run, commands=fake("hopeless"), out=io.StringIO()) == 1
    wait_until_all_are_gone(alive)
    assert json.loads((run / "summary.json").read_text())["stop_reason"] == "no_trainable_groups"


def test_no_progress_is_an_error(config, tmp_path, alive):
    overrides = ["stop.no_progress_secs=0.5"]
    with pytest.raises(NoProgress, match=r"no new version for 0.5 s"):
        launch(config, tmp_path / "run", overrides, commands=fake("stuck"), out=io.StringIO())
    wait_until_all_are_gone(alive)


def start_launcher(config: Path, run: Path, scenario: str) -> subprocess.Popen:
    """A launcher of its own, and its version 1 reached."""
    ready = run.with_name("ready")
    os.mkfifo(ready)
    code = (
        "import sys; from pipelines.launcher.launch import launch\n"
        "from pipelines.launcher.role_commands import RoleCommands\n"
        "c = RoleCommands(headrace=tuple(sys.argv[3:]))\n"
        "sys.exit(launch(sys.argv[1], sys.argv[2], commands=c))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(config), str(run), *fake(scenario).headrace],
        env={**os.environ, "READY": str(ready)},
        stdout=subprocess.DEVNULL,
    )
    assert ready.read_text() == "ready\n"
    return launcher


def test_ctrl_c_stops_all_and_the_run_goes_on(config, tmp_path, alive):
    run = tmp_path / "run"
    launcher = start_launcher(config, run, "interrupt")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait() == 128 + signal.SIGINT
    wait_until_all_are_gone(alive)
    first = json.loads((run / "summary.json").read_text())
    assert (first["stop_reason"], first["pass_rate_after"]) == ("interrupted", None)

    assert launch(config, run, commands=fake(), out=io.StringIO()) == 0
    second = json.loads((run / "summary.json").read_text())
    assert (second["updates"], second["sessions"]) == (3, 2)
    assert second["wall_seconds"] > first["wall_seconds"]
    assert (run / "evaluated").read_text().split() == ["0", "3"]


def test_children_die_with_a_killed_launcher(config, tmp_path, alive):
    launcher = start_launcher(config, tmp_path / "run", "killed")
    with pytest.raises(ConfigError, match="another `headrace run` works in this folder"):
        launch(config, tmp_path / "run", commands=fake())
    launcher.kill()
    launcher.wait()
    wait_until_all_are_gone(alive)


def taken_port() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run\n", "cannot be read as TOML"),
        (CONFIG.replace("updates", "udpates"), "unknown key 'udpates'; did you mean 'updates'?"),
        (CONFIG + "[optimiser]\n", "unknown section [optimiser]; did you mean 'optimizer'?"),
        (CONFIG + "[sampling]\nn = 1\n", "n = 1"),
        (
            CONFIG.replace('source = "addition"', 'path = "gone.jsonl"'),
            "prompt file gone.jsonl: no such file",
        ),
        (CONFIG + "[recipe.settings.x]\n", "cannot be read as TOML"),
        (CONFIG.replace("[recipe]", '[recipe]\nscorers = ["exact"]'), "exact_answer"),
        (CONFIG + "[admission]\ngroups_per_step = 1000000000\n", "not enough disk space"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, alive, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(HeadraceError) as refused:
        launch(path, tmp_path / "run", commands=fake())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
    wait_until_all_are_gone(alive)


def test_a_port_in_use_is_refused(config, tmp_path, alive):
    with taken_port() as taken, pytest.raises(ConfigError) as refused:
        port = taken.getsockname()[1]
        launch(config, tmp_path / "run", [f"endpoint.port={port}"], commands=fake())
    assert f"127.0.0.1:{port} cannot be used (Address already in use)" in str(refused.value)
    wait_until_all_are_gone(alive)


def test_missing_config(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        launch(tmp_path / "none.toml")


def test_the_checks_own_words_are_shown(config, tmp_path):
    overrides = ["sampling.n=1", "recipe.filters=[]", "recipe.min_group=1"]
    with pytest.raises(HeadraceError) as refused:
        launch(config, tmp_path / "run", overrides, commands=fake())
    assert str(refused.value) == "n = 1 has no group advantage; set n >= 2"
    assert refused.value.exit_code == 2
