"""One role as an operating system process: how it is started, logged, asked to stop and reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TAIL_BYTES = 8192
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # Huge pages for large buffers (glibc; others ignore it): the demo's training step takes 7 %
    # less, its generation 17 % (docs/LOG.md).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""What every role starts with, unless the user's environment has it already."""


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What to run for a role."""

    name: str
    """``trainer``, ``worker``, ``controller``, ``rollouts-0``, ...; also names its log."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's environment."""
    ends_by_itself: bool = True
    """False: exit code 0 is a death like any other unless the launcher asked for it."""
    repeatable: bool = True
    """False: a failure is final (only a death by signal is answered with a restart)."""
    grace_secs: float = 90.0
    """How long it may take to save when asked to stop; then it is killed."""
    output: Path | None = None
    """Where standard output goes; the log when None."""


class RoleProcess:
    """A running role, leader of its own process group.

    The group keeps a terminal's Ctrl-C away from the role (the launcher decides what it means) and
    lets the launcher end what the role itself started.
    """

    def __init__(self, spec: RoleSpec, log: Path) -> None:
        self.spec = spec
        log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as files:
            errors = files.enter_context(log.open("ab"))
            output = files.enter_context(spec.output.open("wb")) if spec.output else errors
            self._popen = subprocess.Popen(
                guarded(spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**ENVIRONMENT, **os.environ, **spec.env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """Return the exit code once the role has ended, else None; clears its group first.

        The group is killed before the leader is reaped, so its number cannot name another yet.
        """
        if self._popen.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            self._signal_group(signal.SIGKILL)
            self._popen.wait()
        return self._popen.returncode

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the role alone: it knows what its own children need."""
        if self._popen.returncode is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the role and everything in its group now."""
        if self._popen.returncode is None:
            self._signal_group(signal.SIGKILL)
            self._popen.wait()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def guarded(argv: Sequence[str]) -> list[str]:
    """Return the command that runs ``argv`` so that it dies with this process."""
    guard = [sys.executable, "-P", "-m", "pipelines.launcher.die_with_parent"]
    return [*guard, str(os.getpid()), *argv]


def last_line(log: Path) -> str:
    """Return the last line of a log that says something, or ``""``."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
