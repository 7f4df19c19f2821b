"""``launch``: one call from a configuration to a finished, or cleanly stopped, run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from infra.clock import Clock, SystemClock
from infra.config import to_toml
from infra.contracts.errors import HeadraceError
from infra.hints import FOLDER_VARIABLE
from infra.ledger.audit import audit
from infra.metrics import MetricsReader
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.storage.open_store import open_store
from pipelines.launcher.closing_words import MEANING, closing_words
from pipelines.launcher.disk_estimate import refuse_if_short
from pipelines.launcher.launcher_state import load_state, replace_object
from pipelines.launcher.live_table import open_view
from pipelines.launcher.ports import claim_port
from pipelines.launcher.progress import Progress
from pipelines.launcher.report import ReportFacts, render_report
from pipelines.launcher.restart_policy import RestartPolicy
from pipelines.launcher.role_commands import RoleCommands
from pipelines.launcher.run_folder import enter_run, only_launcher, refuse_other_configuration
from pipelines.launcher.run_plan import RunPlan, free_bytes, plan_run, used_bytes
from pipelines.launcher.sample_rollouts import read_samples
from pipelines.launcher.session import Interrupted, Session
from pipelines.launcher.signal_waker import SignalWaker
from pipelines.launcher.stop_conditions import RunPosition, stop_reason
from pipelines.launcher.summary import build_summary, summary_bytes

BAD_ENDS = ("no_trainable_groups",)
"""The roles ended well, but not because anything was reached."""


def launch(
    config: str | Path,
    run_dir: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    dry_run: bool = False,
    as_json: bool = False,
    commands: RoleCommands | None = None,
    policy: RestartPolicy | None = None,
    clock: Clock | None = None,
    out: TextIO | None = None,
) -> int:
    """Run a configuration on this machine until it stops; start it or take it up again.

    Must be called in the main thread (it handles signals). No child outlives the call.

    Args:
        config: a TOML file, or the folder of a run.
        run_dir: the run's folder or ``gs://`` location; ``runs/<run.name>`` by default.
        overrides: ``section.key=value`` items.
        dry_run: check everything, print the resolved configuration and the plan, start nothing.
        as_json: end with the summary as one JSON line on ``out``; progress goes to stderr.
        commands: how each role is started.
        policy: bounds for restarting roles.
        clock: wall clock.
        out: where a person, or with ``as_json`` a program, reads.

    Returns:
        Exit code: 0 for a good end, 1 for a bad one, 128 + signal when interrupted.

    Raises:
        HeadraceError: one clear line; nothing is left running.
    """
    commands, clock, out = commands or RoleCommands(), clock or SystemClock(), out or sys.stdout
    started_at = clock.now()
    plan = plan_run(str(config), run_dir and str(run_dir), overrides, commands)
    store = open_store(plan.location)
    refuse_other_configuration(store, plan.tree)
    claim_port(plan.shared.endpoint.host, plan.shared.endpoint.port)
    if dry_run:
        print(f"{to_toml(plan.tree)}\n{plan.describe()}", file=out)
    refuse_if_short(plan.disk, free_bytes(plan.folder) + used_bytes(plan.folder), str(plan.folder))
    if dry_run:
        return 0
    with only_launcher(plan.folder):
        reached = nothing_left(store, plan, clock)
        if reached:
            words = f"{plan.location}: complete ({MEANING[reached]}); raise [stop] to go on, e.g. "
            more = 2 * plan.shared.stop.updates
            print(f"{words}--set stop.updates={more}", file=sys.stderr if as_json else out)
            if as_json:
                print(json.dumps(json.loads(store.read(run_layout.SUMMARY))), file=out)
            return 0
        return _run(
            plan, store, commands, policy or RestartPolicy(), clock, started_at, as_json, out
        )


def _run(
    plan: RunPlan,
    store: ObjectStore,
    commands: RoleCommands,
    policy: RestartPolicy,
    clock: Clock,
    started_at: float,
    as_json: bool,
    out: TextIO,
) -> int:
    """One session in a folder that is ours; see ``launch``."""
    resumed = enter_run(store, plan.tree)
    view = open_view(sys.stderr if as_json else out, plan.shared.run.name, plain=as_json)
    view.say(f"{'resuming' if resumed else 'starting'} {plan.shared.run.name} in {plan.location}")
    with tempfile.TemporaryDirectory(prefix="hr-") as hints, SignalWaker() as waker:
        os.environ[FOLDER_VARIABLE] = hints
        session = Session(
            plan=plan,
            store=store,
            commands=commands,
            hints=Path(hints),
            clock=clock,
            waker=waker,
            view=view,
            policy=policy,
            started_at=started_at,
        )
        code, problem = 0, None
        try:
            code = 1 if session.run() in BAD_ENDS else 0
        except Interrupted:
            code = 128 + waker.last_stop
        except HeadraceError as e:
            problem = e
        finally:
            del os.environ[FOLDER_VARIABLE]
        summary = write_results(store, plan, session)
    if as_json:
        print(json.dumps(summary), file=out)
    else:
        print(closing_words(summary, read_samples(store), plan.location, plan.folder), file=out)
    if problem is not None:
        raise problem
    return code


def nothing_left(store: ObjectStore, plan: RunPlan, clock: Clock) -> str:
    """Return why a run needs no further session, or ``""``."""
    state = load_state(store)
    if not state.stop_reason or (plan.held_out_prompts and state.after is None):
        return ""
    if state.stop_reason == "prompts_exhausted":
        return state.stop_reason
    snapshot = Progress(store, plan.shared.run.name).poll(clock.now())
    if state.after is not None and state.after.version != snapshot.version:
        return ""
    rates = [step.pass_rate for step in snapshot.trained]
    at = RunPosition(version=snapshot.version, wall_secs=state.wall_secs, pass_rates=rates)
    return stop_reason(plan.shared.stop, at)


def write_results(store: ObjectStore, plan: RunPlan, session: Session) -> dict[str, Any]:
    """Write ``summary.json`` and ``report.html``; return the summary."""
    summary = build_summary(
        name=plan.shared.run.name,
        state=session.state,
        snapshot=session.snapshot,
        audit=audit(store),
        restarts=session.supervisor.restarts,
    )
    replace_object(store, run_layout.SUMMARY, summary_bytes(summary))
    lineage = store.read_with_token(run_layout.LINEAGE)
    page = render_report(
        ReportFacts(
            summary=summary,
            steps=session.snapshot.trained,
            trainer_rows=MetricsReader(store, "trainer").poll(),
            samples=read_samples(store),
            config=to_toml(plan.tree),
            lineage=json.loads(lineage[0]) if lineage else None,
        )
    )
    replace_object(store, run_layout.REPORT, page.encode())
    return summary
