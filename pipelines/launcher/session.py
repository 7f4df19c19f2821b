"""One session of a run on this machine: start the roles in order, follow them, end them.

The order is written once, in ``Session.run``. Everything that is decided is decided elsewhere
(``stop_conditions``, ``restart_policy``); everything that is known comes from the run's store.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from infra.clock import Clock
from infra.contracts.errors import HeadraceError
from infra.hints import FOLDER_VARIABLE, send_hint
from infra.storage import run_layout
from infra.storage.folder_copy import upload_folder
from infra.storage.object_store import ObjectStore
from pipelines.launcher.launcher_state import (
    Evaluation,
    LauncherState,
    load_state,
    read_evaluation,
    save_state,
)
from pipelines.launcher.live_table import View, who_does_what, who_waits
from pipelines.launcher.ports import claim_port, free_port, served_version
from pipelines.launcher.progress import Progress, RunSnapshot
from pipelines.launcher.restart_policy import RestartPolicy, Verdict
from pipelines.launcher.role_commands import RoleCommands
from pipelines.launcher.role_process import RoleSpec
from pipelines.launcher.run_plan import RunPlan
from pipelines.launcher.signal_waker import SignalWaker
from pipelines.launcher.stop_conditions import RunPosition, stop_reason
from pipelines.launcher.supervisor import Supervisor

POLL_SECS = 1.0
START_POLL_SECS = 0.1
"""While the start of one role waits for another to be ready."""
PIPELINE_GRACE_SECS = 3.0
"""A pipeline has nothing to save: what it had in flight comes again under the same ids. Asked to
stop while its broker is gone, it would go on asking for a minute."""


class Interrupted(Exception):
    """Somebody asked the launcher to stop."""


class NoProgress(HeadraceError):
    """No new version appeared for [stop] no_progress_secs."""


class Session:
    """Runs a plan from wherever its folder stands.

    Args:
        plan: validated; its ``run.toml`` is written.
        store: the run's folder.
        commands: the command line of each role.
        hints: a short temporary folder for wake-up hints.
        clock: wall clock.
        waker: tells about signals, and waits.
        view: where progress is shown.
        policy: bounds for restarts.
        started_at: when the command began, on ``clock``.
    """

    def __init__(
        self,
        *,
        plan: RunPlan,
        store: ObjectStore,
        commands: RoleCommands,
        hints: Path,
        clock: Clock,
        waker: SignalWaker,
        view: View,
        policy: RestartPolicy,
        started_at: float,
    ) -> None:
        self._plan, self._store, self._commands, self._hints = plan, store, commands, hints
        self._clock, self._waker, self._view = clock, waker, view
        self._run = plan.location
        self._folder = plan.folder
        earlier = load_state(store)
        self._earlier_secs = earlier.wall_secs
        self.state: LauncherState = replace(earlier, stop_reason="", sessions=earlier.sessions + 1)
        self._started_at = started_at
        self.supervisor = Supervisor(
            log_of=lambda role: self._folder / run_layout.log(role),
            policy=policy,
            clock=clock,
            on_death=self._mourn,
        )
        self._progress = Progress(store, plan.shared.run.name)
        self.snapshot: RunSnapshot = self._progress.poll(clock.now())
        self._next_poll = 0.0
        self._progress_at = clock.now()
        self._endpoint = ""

    def run(self) -> str:
        """Go through the whole order; return why the run ended. Children are gone on return.

        Raises:
            Interrupted: somebody asked to stop; the run can be resumed.
            RoleFailed: a role was given up.
            NoProgress: nothing moved for too long.
        """
        reason = "failed"
        try:
            self._make_initial_model()
            self._start_serving()
            if self.snapshot.version == 0:
                self.state = replace(self.state, before=self._evaluated(0, self.state.before))
            self._start_rollouts()
            reason = self._follow()
            version = self._poll().version
            self.state = replace(self.state, after=self._evaluated(version, self.state.after))
            return reason
        except Interrupted:
            reason = "interrupted"
            self._view.say("stopping: the trainer saves, then all end (once more: kill)")
            raise
        except NoProgress:
            reason = "no_progress"
            raise
        finally:
            self._end(reason)

    # The order.

    def _make_initial_model(self) -> None:
        """Run the supervised warm start once; its marker comes last."""
        if not self._plan.warm_start or self._has(run_layout.INIT_DONE):
            return
        out = self._folder / run_layout.INIT_MODEL
        self._view.say(f"warm start: supervised steps into {out}")
        argv = self._commands.warm_start(self._run, str(out))
        self._finish(RoleSpec(name="warm-start", argv=argv, repeatable=False))
        if self._plan.remote:
            upload_folder(self._store, run_layout.INIT_MODEL, out)
        self._store.create(run_layout.INIT_DONE, json.dumps({"by": "warm start"}).encode())

    def _start_serving(self) -> None:
        """Start trainer and worker; wait for the first version and for the worker to have it."""
        endpoint = self._plan.shared.endpoint
        port = claim_port(endpoint.host, endpoint.port)
        self._endpoint = f"http://{endpoint.host}:{port}"
        self._start(RoleSpec(name="trainer", argv=self._commands.trainer(self._run)))
        worker = self._commands.worker(self._run, port)
        self._start(RoleSpec(name="worker", argv=worker, ends_by_itself=False))
        self._until(lambda: self._has(run_layout.WEIGHTS_LATEST))
        self._until(lambda: served_version(self._endpoint) is not None)
        self._poll()

    def _start_rollouts(self) -> None:
        """Start the controller and, with its broker's address, the pipeline processes."""
        broker = free_port("127.0.0.1")
        argv = self._commands.controller(self._run, broker)
        self._start(RoleSpec(name="controller", argv=argv))
        env = {"PUBSUB_EMULATOR_HOST": f"127.0.0.1:{broker}"}
        for k, name in enumerate(self._pipelines()):
            argv = self._commands.pipeline(self._run, self._endpoint, k)
            self._start(
                RoleSpec(
                    name=name,
                    argv=argv,
                    env=env,
                    ends_by_itself=False,
                    grace_secs=PIPELINE_GRACE_SECS,
                )
            )

    def _follow(self) -> str:
        """Watch until controller and trainer have ended well; return why the run ended."""
        asked = ""
        while not self._ended("trainer", "controller"):
            self._turn(POLL_SECS)
            if self._ended("controller"):
                # Nothing is in flight, and the broker the pipelines would ask is gone.
                self._stop(*self._pipelines())
            reason = stop_reason(self._plan.shared.stop, self._position())
            if reason and reason != "updates_reached" and not asked:
                asked = reason
                self._drain(reason)
        done = json.loads(self._store.read(run_layout.CONTROL_DONE))["reason"]
        return asked if asked and done == "drained" else done

    def _end(self, reason: str) -> None:
        """Stop what still runs and write down how far the run came."""
        stops = self._waker.stops
        self._view.close()
        self.supervisor.stop(
            wait=self._waker.wait,
            hurry=lambda: self._waker.stops > stops,
        )
        self.snapshot = self._progress.poll(self._clock.now())
        self.state = replace(self.state, stop_reason=reason)
        self._save()

    # The pieces.

    def _evaluated(self, version: int, known: Evaluation | None) -> Evaluation | None:
        """Return the evaluation of a version, made now unless it is known already."""
        if self._plan.held_out_prompts == 0 or (known is not None and known.version == version):
            return known
        self._view.say(f"evaluating version {version} on {self._plan.held_out_prompts} prompts")
        output = self._folder / run_layout.log("evaluate").replace(".log", ".json")
        argv = self._commands.evaluate(self._run, self._endpoint, version)
        self._finish(RoleSpec(name="evaluate", argv=argv, output=output))
        found = read_evaluation(output.read_text(encoding="utf-8"))
        low, high = found.interval
        rate = f"{found.pass_rate:.1%} (95 % interval {low:.1%} to {high:.1%})"
        self._view.say(f"version {version}: held-out pass rate {rate}")
        return found

    def _finish(self, job: RoleSpec) -> None:
        """Run a one-off job under supervision until it has ended well."""
        self._start(job)
        self._until(lambda: self._ended(job.name))

    def _start(self, spec: RoleSpec) -> None:
        self._progress_at = self._clock.now()
        env = {FOLDER_VARIABLE: str(self._hints), **spec.env}
        self.supervisor.start(replace(spec, env=env))

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._turn(START_POLL_SECS)

    def _turn(self, secs: float) -> None:
        """Wait a little, tend the children, look at the run when it is time."""
        due = self.supervisor.next_due()
        self._waker.wait(secs if due is None else min(secs, due - self._clock.now()))
        if self._waker.stops:
            raise Interrupted
        self.supervisor.tend()
        if self._clock.now() >= self._next_poll:
            self._poll()
            limit = self._plan.shared.stop.no_progress_secs
            if 0 < limit <= self._clock.now() - self._progress_at:
                waits = who_waits(self.snapshot) or who_does_what(self.snapshot)
                raise NoProgress(
                    f"no new version for {limit:g} s ([stop] no_progress_secs): {waits}; "
                    f"the logs are in {self._folder / run_layout.LOGS}"
                )

    def _poll(self) -> RunSnapshot:
        now = self._clock.now()
        before, self.snapshot = self.snapshot, self._progress.poll(now)
        self._next_poll = now + POLL_SECS
        if self.snapshot.version > before.version:
            self._progress_at = now
            self._save()
        self._view.show(self.snapshot, self._plan.shared.stop.updates, now)
        return self.snapshot

    def _position(self) -> RunPosition:
        now = self._clock.now()
        return RunPosition(
            version=self.snapshot.version,
            wall_secs=self._earlier_secs + now - self._started_at,
            pass_rates=[step.pass_rate for step in self.snapshot.trained],
        )

    def _save(self) -> None:
        wall_secs = self._earlier_secs + self._clock.now() - self._started_at
        self.state = replace(self.state, wall_secs=wall_secs)
        save_state(self._store, self.state)

    def _drain(self, reason: str) -> None:
        self._view.say(f"{reason.replace('_', ' ')} reached: draining")
        command = json.dumps({"reason": reason}).encode()
        self._store.create(run_layout.command("drain"), command)
        self._progress_at = self._clock.now()
        for role in ("controller", "trainer"):
            send_hint(role, command="drain")

    def _mourn(self, spec: RoleSpec, verdict: Verdict) -> None:
        """Tell of a death; a dead pipeline's leases need not run out."""
        delay = f"again in {verdict.delay_secs:.1f} s"
        self._view.say(f"{spec.name} {verdict.why}; starting it {delay}")
        if spec.name.startswith("rollouts-"):
            send_hint("controller", dead_subscription=int(spec.name.partition("-")[2]))

    def _has(self, key: str) -> bool:
        return self._store.read_with_token(key) is not None

    def _ended(self, *names: str) -> bool:
        return all(self.supervisor.finished(name) for name in names)

    def _pipelines(self) -> list[str]:
        return [f"rollouts-{k}" for k in range(self._plan.processes)]

    def _stop(self, *names: str) -> None:
        self.supervisor.stop(names, wait=self._waker.wait)
