"""``headrace audit RUN``: account for every admitted group. Exit code 0 for a sound run, else 1."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from infra.ledger.audit import Audit, audit
from infra.storage.open_run import open_run

_MEANING = {
    "admitted": "prompts admitted by the controller",
    "trained": "consumed by a step",
    "rejected": "kept in rejects/, by a filter",
    "failed": "kept in failures/",
    "dropped": "too old when their turn came",
    "waiting": "committed, not yet consumed",
    "in_flight": "on their way through the pipeline",
    "lost": "in no place at all; must be 0",
    "twice": "consumed by two steps; must be 0",
    "superseded": "further copies of a group that do not count",
    "reissued": "messages published again after a lease expired",
    "max_lag_seen": "versions between a consumed group's rollouts and its step",
}
_SHOWN = 20


def main(argv: list[str]) -> int:
    """Print the audit of a run."""
    parser = argparse.ArgumentParser(prog="headrace audit", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    result = audit(open_run(args.run))
    print(json.dumps(asdict(result) | {"holds": result.holds}) if args.json else as_text(result))
    return 0 if result.holds else 1


def as_text(result: Audit) -> str:
    """The audit as a table, and what is wrong below it."""
    lines = [f"{name:<12} {value:>8}  {_MEANING[name]}" for name, value in result.numbers().items()]
    sign = "=" if result.admitted == result.accounted else "IS NOT"
    lines.append(
        f"\nadmitted {result.admitted} {sign} trained + rejected + failed + dropped + waiting "
        f"+ in_flight + lost {result.accounted}"
    )
    for title, names in (
        ("lost admission indices", result.lost_indices),
        ("groups consumed twice", result.twice_groups),
        ("groups with a state but no admission or no committed copy", result.unplaced_groups),
    ):
        if names:
            more = f" ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{title}: {' '.join(map(str, names[:_SHOWN]))}{more}")
    lines.append("sound" if result.holds else "NOT SOUND")
    return "\n".join(lines)
