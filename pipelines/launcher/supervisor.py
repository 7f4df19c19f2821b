"""Keeps the processes of a run alive: starts them, restarts one that dies, ends them all.

Decisions are ``restart_policy``'s; this file only carries them out. It never waits by itself:
``tend`` is called from the launcher's loop, and ``stop`` waits through the function it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from infra.clock import Clock
from infra.contracts.errors import HeadraceError
from pipelines.launcher.restart_policy import Action, RestartPolicy, Verdict, judge_exit
from pipelines.launcher.role_process import RoleProcess, RoleSpec, last_line


class RoleFailed(HeadraceError):
    """A role ended and must not, or may no longer, be restarted."""


class Supervisor:
    """The running roles of one run.

    Args:
        log_of: role name -> its log file.
        policy: bounds for restarts.
        clock: seconds for the policy's window and delays.
        on_death: called with the role and the verdict each time one is about to be restarted.
    """

    def __init__(
        self,
        *,
        log_of: Callable[[str], Path],
        policy: RestartPolicy,
        clock: Clock,
        on_death: Callable[[RoleSpec, Verdict], None] = lambda spec, verdict: None,
    ) -> None:
        self._log_of = log_of
        self._policy = policy
        self._clock = clock
        self._on_death = on_death
        self._running: dict[str, RoleProcess] = {}
        self._due: dict[str, tuple[float, RoleSpec]] = {}
        self._restarts: dict[str, list[float]] = {}
        self._finished: set[str] = set()

    def start(self, spec: RoleSpec) -> None:
        """Start a role; one of that name must not be running."""
        assert spec.name not in self._running, f"{spec.name} is running"
        self._finished.discard(spec.name)
        self._running[spec.name] = RoleProcess(spec, self._log_of(spec.name))

    def tend(self) -> None:
        """Reap what ended, start what is due. Raises ``RoleFailed`` for a role given up."""
        now = self._clock.now()
        for name, process in list(self._running.items()):
            code = process.exit_code()
            if code is not None:
                del self._running[name]
                self._bury(process.spec, code, now)
        for name, (due, spec) in list(self._due.items()):
            if now >= due:
                del self._due[name]
                self._restarts.setdefault(name, []).append(now)
                self.start(spec)

    def _bury(self, spec: RoleSpec, code: int, now: float) -> None:
        verdict = judge_exit(
            self._policy,
            exit_code=code,
            ends_by_itself=spec.ends_by_itself,
            repeatable=spec.repeatable,
            restarts=self._restarts.get(spec.name, ()),
            now=now,
        )
        if verdict.action is Action.FINISHED:
            self._finished.add(spec.name)
        elif verdict.action is Action.RESTART:
            self._due[spec.name] = (now + verdict.delay_secs, spec)
            self._on_death(spec, verdict)
        else:
            log = self._log_of(spec.name)
            said = last_line(log) or "it said nothing"
            failure = RoleFailed(f"the {spec.name} {verdict.why}: {said} (log: {log})")
            failure.exit_code = code if code > 0 else RoleFailed.exit_code
            raise failure

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the roles that run now."""
        return {name: process.pid for name, process in self._running.items()}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each role was restarted."""
        return {name: len(times) for name, times in self._restarts.items()}

    def finished(self, name: str) -> bool:
        """Whether a role that ends by itself has ended well."""
        return name in self._finished

    def next_due(self) -> float | None:
        """When the next restart is due, on the supervisor's clock."""
        return min((due for due, _ in self._due.values()), default=None)

    def stop(
        self,
        names: Collection[str] | None = None,
        *,
        wait: Callable[[float], None],
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """Ask roles to stop (all by default), wait, kill what remains. Nothing is restarted.

        Args:
            names: which roles.
            wait: returns after the seconds given, or earlier when a child ends.
            hurry: checked after each wait; True kills what remains now.
        """
        chosen = [name for name in self._running if names is None or name in names]
        self._due = {n: due for n, due in self._due.items() if names is not None and n not in names}
        leaving = [self._running.pop(name) for name in chosen]
        asked_at = self._clock.now()
        try:
            for process in leaving:
                process.ask_to_stop()
            while leaving and not hurry():
                waited = self._clock.now() - asked_at
                for process in leaving:
                    if waited >= process.spec.grace_secs:
                        process.kill()
                leaving = [process for process in leaving if process.exit_code() is None]
                if leaving:
                    wait(min(process.spec.grace_secs for process in leaving) - waited)
        finally:
            for process in leaving:
                process.kill()
