"""``headrace serve RUN --port P``: the inference worker's process.

Threads: one decodes (``Scheduler.run``), one follows the weights, one per connection serves HTTP;
the main thread beats, writes metrics and waits for SIGTERM. A thread that dies ends the process.
"""

from __future__ import annotations

import argparse
import os
import queue
import resource
import signal

from infra.bearer_token import WORKER, read_token
from infra.contracts.errors import ConfigError
from infra.run_tree import read_run_tree
from infra.storage.open_store import open_store
from trainer.inference_worker.http.http_limits import HttpLimits

ROLE = "worker"
FILES_PER_CONNECTION = 4
"""Its socket, the pair its thread is woken by, and as many again that are refused."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace serve", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--host", help="default: [endpoint] host")
    parser.add_argument("--port", type=int, help="default: [endpoint] port; 0: any free one")
    parser.add_argument("--version", type=int, help="serve this version only, follow none")
    parser.add_argument(
        "--weights-server", metavar="URL", default="", help="default: [weights] server"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        default="",
        help="its line is what callers must show; default: $HEADRACE_WORKER_TOKEN, if set",
    )
    parser.add_argument(
        "--max-connections", type=int, metavar="N", default=512, help="then 503; default: 512"
    )
    parser.add_argument(
        "--drain-secs",
        type=float,
        metavar="S",
        default=20.0,
        help="how long SIGTERM lets running requests finish; default: 20",
    )
    parser.add_argument("--role", default=ROLE, help="name in heartbeats, hints and metrics")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT (exit 0) or until a thread fails."""
    args = parse_args(argv)
    token = read_token(WORKER, args.token_file)
    try:
        limits = HttpLimits(connections=args.max_connections, drain_secs=args.drain_secs)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    store = open_store(args.run)
    tree, where = read_run_tree(store)

    # JAX is loaded only now: --help and a wrong folder answer at once.
    from infra.clock import SystemClock
    from trainer.config import parse_trainer
    from trainer.inference_worker.worker import Worker
    from trainer.model.pretrained import cache_folder

    config = parse_trainer(tree, where)
    _allow_open_files(FILES_PER_CONNECTION * limits.connections)
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
        weights_server=args.weights_server,
        limits=limits,
        token=token,
    )
    worker.serve(mailbox, pinned=args.version)
    return 0


def _allow_open_files(more: int) -> None:
    """Raise the soft limit, often 1024, as far as connections need and the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = more + 256
    if hard != resource.RLIM_INFINITY:
        need = min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
