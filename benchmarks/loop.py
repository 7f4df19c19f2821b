"""What the loop costs: wall time per update of a real run against `single_process`, in one sitting.

Three arms, taken in turn and repeated: the same updates in one process; `headrace run` with
max_lag = 0; with max_lag = 1. An update of a run lasts from one ledger entry to the next; the first
two (compilation, filling) are left out in every arm. Reported: the median wall time of an update,
so that a step that compiles another shape does not count, its median over the repeats, two ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.contracts.errors import HeadraceError
from infra.ledger import ledger
from infra.storage.local_store import LocalStore
from pipelines.launcher.role_process import ENVIRONMENT

SKIP = 2
"""Updates left out at the start."""


def main(argv: list[str]) -> int:
    """Run all arms and print the table, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(prog="headrace bench loop", description=__doc__)
    parser.add_argument("--config", default="examples/demo.toml")
    parser.add_argument("--updates", type=int, default=10, help="per arm and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.updates <= SKIP + 1 or args.repeats < 1:
        parser.error(f"--updates must be above {SKIP + 1} and --repeats at least 1")
    secs: dict[str, list[float]] = {"single": [], "lag0": [], "lag1": []}
    idle: dict[str, list[dict[str, float]]] = {"lag0": [], "lag1": []}
    for repeat in range(args.repeats):
        secs["single"].append(_single(args.config, args.updates, args.set))
        for lag in (0, 1):
            wall, shares = _run(args.config, args.updates, [*args.set, f"admission.max_lag={lag}"])
            secs[f"lag{lag}"].append(wall)
            idle[f"lag{lag}"].append(shares)
        row = ", ".join(f"{arm} {values[-1]:.2f} s" for arm, values in secs.items())
        print(f"repeat {repeat + 1}/{args.repeats}: {row}", file=sys.stderr, flush=True)
    result = _result(secs, idle)
    print(json.dumps(result) if args.json else _table(result))
    return 0


def _single(config: str, updates: int, overrides: list[str]) -> float:
    words = ["-m", "benchmarks.single_process", config, "--updates", str(updates)]
    done = _python([*words, *_sets(["prompts.held_out=0.0", *overrides])])
    totals = [json.loads(line)["total"] for line in done.splitlines() if line.startswith("{")]
    return statistics.median(totals[SKIP:])


def _run(config: str, updates: int, overrides: list[str]) -> tuple[float, dict[str, float]]:
    """Seconds per update, and the idle share of each role."""
    fixed = [f"stop.updates={updates}", "prompts.held_out=0.0"]  # no evaluation in the way
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        run = Path(folder) / "run"
        words = ["-m", "infra.commands", "run", config, "--run-dir", str(run), "--json"]
        _python([*words, *_sets([*fixed, *overrides])])
        entries = ledger.entries_after(LocalStore(run), 0)
        starts = [entry.created_at for entry in entries][SKIP:]
        secs = [after - before for before, after in itertools.pairwise(starts)]
        summary = json.loads((run / "summary.json").read_text())
    return statistics.median(secs), summary.get("idle_share", {})


def _sets(overrides: list[str]) -> list[str]:
    return [word for item in overrides for word in ("--set", item)]


def _python(words: list[str]) -> str:
    env = {**ENVIRONMENT, **os.environ}  # the peer gets what the roles of a run get
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, env=env)
    if done.returncode:
        raise HeadraceError(f"bench loop: `{' '.join(words)}` ended with {done.returncode}")
    return done.stdout


def _result(secs: dict[str, list[float]], idle: dict[str, list[dict[str, float]]]) -> dict:
    median = {arm: statistics.median(values) for arm, values in secs.items()}
    roles = {
        arm: sorted({role for shares in runs for role in shares}) for arm, runs in idle.items()
    }
    return {
        "loop_over_single_process": round(median["lag0"] / median["single"], 3),
        "lag1_over_lag0": round(median["lag1"] / median["lag0"], 3),
        "secs_per_update": {arm: round(value, 3) for arm, value in median.items()},
        "all_secs_per_update": {arm: [round(v, 3) for v in vs] for arm, vs in secs.items()},
        "idle_share": {
            arm: {
                role: round(statistics.median([s[role] for s in runs if role in s]), 3)
                for role in roles[arm]
            }
            for arm, runs in idle.items()
        },
    }


def _table(result: dict) -> str:
    secs, idle = result["secs_per_update"], result["idle_share"]
    lines = ["arm                         s/update   idle share of each role"]
    for arm, name in (("single", "one process"), ("lag0", "headrace run, max_lag 0"),
                      ("lag1", "headrace run, max_lag 1")):  # fmt: skip
        shares = ", ".join(f"{role} {share:.0%}" for role, share in idle.get(arm, {}).items())
        lines.append(f"{name:<26} {secs[arm]:>9.2f}   {shares}")
    lines.append(f"loop over single process   {result['loop_over_single_process']:.3f}x")
    lines.append(f"max_lag 1 over max_lag 0   {result['lag1_over_lag0']:.3f}x")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
