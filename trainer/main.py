"""``headrace train RUN``: consume shards, publish weights. ``--check`` only judges a configuration.

SIGTERM finishes the current step, saves and exits with 76. Exit 75 means that another trainer took
over.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from infra.config import apply_overrides
from infra.contracts.errors import Preempted
from infra.run_tree import read_run_tree, read_tree
from trainer.config import parse_trainer


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", help="the run's folder; with --check also a TOML file")
    parser.add_argument(
        "--check", action="store_true", help="judge the trainer's sections, then exit"
    )
    parser.add_argument("--prepare", action="store_true", help="with --check: fetch the model too")
    parser.add_argument("--json", action="store_true", help="with --check: print sizes as JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="with --check"
    )
    args = parser.parse_args(argv)
    if not args.check and (args.prepare or args.json or args.set):
        parser.error("--prepare, --json and --set go with --check")
    return args


def main(argv: Sequence[str]) -> int:
    """Train until the run is over. Raises ``HeadraceError`` for everything a user can mend."""
    args = parse_args(argv)
    if args.check:
        from trainer.check import check

        tree, where = read_tree(args.run)
        tree = apply_overrides(tree, args.set)
        report = check(parse_trainer(tree, where), prepare=args.prepare, environ=os.environ)
        print(report.to_json() if args.json else report.to_text(where))
        return 0

    from infra.clock import SystemClock
    from infra.hints import HintListener
    from infra.storage.open_store import local_folder, open_store

    store = open_store(args.run)
    config = parse_trainer(*read_run_tree(store))

    # JAX is loaded only now: --help, --check and a wrong folder answer at once.
    from trainer.stopping import Stopping
    from trainer.training_run import TrainingRun

    stop, step_groups = config.shared.stop.updates, config.shared.admission.groups_per_step
    stopping = Stopping(store, stop, step_groups)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(stopping, "preempted", True))
    with HintListener("trainer") as wakeups:
        run = TrainingRun(
            store=store,
            config=config,
            stopping=stopping,
            wakeups=wakeups,
            clock=SystemClock(),
            name=uuid.uuid4().hex[:12],
            environ=os.environ,
            scratch=local_folder(store.url),
        )
        version = run.train()
    if stopping.preempted:
        raise Preempted(f"stopped by a signal; version {version} is saved, start again to go on")
    print(f"version {version}, nothing more to train", file=sys.stderr)
    return 0
