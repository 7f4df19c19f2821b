"""Start the real `headrace run` as a user would, watch it through its folder, read the result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from infra.heartbeats import read_heartbeats
from infra.ledger.audit import Audit, audit
from infra.storage.local_store import LocalStore

ROOT = Path(__file__).parents[2]


def start(config: str, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "infra.commands", "run", config, "--run-dir", str(run_dir)]
    for item in overrides:
        words += ["--set", item]
    log = open(run_dir.with_suffix(".log"), "a")  # noqa: SIM115 (the child keeps it)
    return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True)


def wait_until(process: subprocess.Popen, done: Callable[[], bool], secs: float) -> None:
    """Return when ``done()``; fail if the process ends first or ``secs`` pass."""
    for _ in range(int(secs / 0.1)):
        if done():
            return
        try:
            code = process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        assert done(), f"headrace run ended early with {code}"
        return
    raise AssertionError(f"not reached within {secs} s")


def latest_version(run_dir: Path) -> int:
    """Newest ledger-complete version that can be seen in the folder, -1 before the first."""
    folder = run_dir / "weights"
    names = [p.parent.name for p in folder.glob("v*/MANIFEST.json")]
    return max((int(name[1:]) for name in names), default=-1)


def pids(run_dir: Path) -> dict[str, int]:
    beats = read_heartbeats(LocalStore(run_dir))
    return {role: int(beat["pid"]) for role, beat in beats.items()}


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def account(run_dir: Path) -> Audit:
    return audit(LocalStore(run_dir))
