"""``headrace serve RUN --port P``: the inference worker's process.

Threads: one decodes (``Scheduler.run``), one follows the weights, one per connection serves HTTP;
the main thread beats, writes metrics and waits for SIGTERM. A thread that dies ends the process.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import tomllib
from typing import Any

from infra.contracts.errors import ConfigError
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.storage.open_store import open_store

ROLE = "worker"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace serve", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--host", help="default: [endpoint] host")
    parser.add_argument("--port", type=int, help="default: [endpoint] port; 0: any free one")
    parser.add_argument("--version", type=int, help="serve this version only, follow none")
    parser.add_argument("--role", default=ROLE, help="name in heartbeats, hints and metrics")
    return parser.parse_args(argv)


def read_run_config(store: ObjectStore) -> tuple[dict[str, Any], str]:
    """The run's resolved configuration, as a tree, and where it lies."""
    where = f"{store.url}/{run_layout.RUN_CONFIG}"
    try:
        return tomllib.loads(store.read(run_layout.RUN_CONFIG).decode()), where
    except KeyError:
        raise ConfigError(
            f"{where}: no such run; give the folder that 'headrace run' made"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{where}: cannot be read as TOML: {e}") from e


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT (exit 0) or until a thread fails."""
    args = parse_args(argv)
    store = open_store(args.run)
    tree, where = read_run_config(store)

    # JAX is loaded only now: --help and a wrong folder answer at once.
    from infra.clock import SystemClock
    from trainer.config import parse_trainer
    from trainer.inference_worker.worker import Worker
    from trainer.model.pretrained import cache_folder

    config = parse_trainer(tree, where)
    # A simple queue may be put to inside a signal handler; an Event may deadlock there.
    mailbox: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: mailbox.put(None))
    endpoint = config.shared.endpoint
    worker = Worker(
        store=store,
        config=config,
        cache=cache_folder(os.environ),
        clock=SystemClock(),
        role=args.role,
        host=args.host or endpoint.host,
        port=endpoint.port if args.port is None else args.port,
    )
    worker.serve(mailbox, pinned=args.version)
    return 0
