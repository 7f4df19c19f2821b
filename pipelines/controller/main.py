"""``headrace control RUN --port P``: admit prompts and serve them as a Pub/Sub subscription.

Ends with 0 when the run is over (``control/done.json`` says why), with 75 when another controller
has taken over, with 76 after SIGTERM; nothing is lost by any of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infra.contracts.errors import ConfigError, Preempted
from infra.run_tree import read_run_tree
from infra.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from pipelines.controller.controller import ControllerParts

DEFAULT_PROCESSES = 2


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace control", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--host", default="127.0.0.1", help="address of the broker (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the broker (0, the default: any free one)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Control a run until it is over. Raises ``HeadraceError`` for what a user can mend."""
    args = parse_args(argv)
    from infra.storage.open_store import open_store

    store = open_store(args.run)
    tree, where = read_run_tree(store)

    # gRPC, the Pub/Sub types and Arrow load only now: --help and a wrong folder answer at once.
    from infra.hints import HintListener
    from pipelines.controller.broker import Broker, subscription
    from pipelines.controller.controller import Controller, run_until_done

    parts = build(store, tree, where)
    broker = Broker(parts.queue, parts.clock, host=args.host, port=args.port)
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stops.append(number))
    try:
        with HintListener("controller") as listener:
            controller = Controller(parts)
            controller.start()
            print(
                f"controller of {parts.config.run.name}, epoch {controller.state.epoch}: "
                f"{parts.source.size} training prompts, broker on {args.host}:{broker.port}",
                file=sys.stderr,
                flush=True,
            )
            over = run_until_done(controller, listener.wait, subscription, lambda: bool(stops))
    finally:
        parts.metrics.flush()
        broker.close()
    if not over:
        raise Preempted("stopped by a signal; everything is saved, start again to go on")
    print(f"controller: {controller.state.stop_reason}, nothing in flight", file=sys.stderr)
    return 0


def build(store: ObjectStore, tree: Mapping[str, Any], where: str) -> ControllerParts:
    """Put a controller's parts together from the run's configuration."""
    from infra.clock import SystemClock
    from infra.heartbeats import Heartbeat
    from infra.metrics import MetricsWriter
    from infra.prompts.order import PromptOrder
    from infra.prompts.prompt_set import load_prompt_set
    from infra.run_config import parse_shared
    from pipelines.controller.controller import ControllerParts
    from pipelines.controller.message_queue import MessageQueue
    from pipelines.controller.prompt_source import PromptSource

    config, processes = parse_shared(tree, where), pipeline_processes(tree, where)
    prompts = load_prompt_set(config.prompts)
    order = PromptOrder(
        size=len(prompts.train),
        seed=config.run.seed,
        shuffle=config.prompts.shuffle,
        epochs=config.prompts.epochs,
    )
    clock = SystemClock()
    incarnation = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    return ControllerParts(
        store=store,
        config=config,
        source=PromptSource(prompts, order),
        queue=MessageQueue(),
        clock=clock,
        heartbeat=Heartbeat(store, "controller", clock),
        metrics=MetricsWriter(store, "controller", incarnation, clock),
        processes=processes,
    )


def pipeline_processes(tree: Mapping[str, Any], where: str) -> int:
    """How many pipeline processes share the messages: ``[pipeline] processes``."""
    processes = tree.get("pipeline", {}).get("processes", DEFAULT_PROCESSES)
    if type(processes) is not int or processes < 1:
        raise ConfigError(f"{where} [pipeline]: processes = {processes!r}; at least 1")
    return processes
