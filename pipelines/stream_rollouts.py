"""``headrace rollouts``: the streaming pipeline, from the controller's messages to shards.

``ReadFromPubSub -> ParseTasks -> RolloutPipeline``, on ``BundleBasedDirectRunner`` here (one bundle
at a time in one thread, so a machine runs several of these processes), on Dataflow with other Beam
options. SIGTERM and Ctrl-C cancel: unfinished groups come again when their leases end.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from infra.clock import SystemClock
from infra.contracts.errors import ConfigError
from infra.heartbeats import Heartbeat
from infra.inference.open_client import require_trainable
from infra.run_config import SharedConfig
from infra.storage.open_run import open_run
from pipelines.beam_options import beam_flags, quiet_import
from pipelines.options import LOCAL_RUNNER, PipelineOptions, read_run_config

if TYPE_CHECKING:
    import apache_beam as beam

    from transforms.parts import Parts, StageSettings

LOCAL_SUBSCRIPTION = "projects/headrace-local/subscriptions/prompts-{process}"
BEAT_SECS = 1.0


def main(argv: list[str]) -> int:
    """Run one pipeline process until it is told to stop, or fails."""
    args, rest = _parse(argv)
    store = open_run(args.run)
    shared, options = read_run_config(store)
    with quiet_import():
        flags = beam_flags(rest, options.pipeline.runner, streaming=True)
        from transforms.parts import parts_of
    _check_broker(flags)
    settings = stage_settings(args, shared, options)
    parts = parts_of(settings)
    require_trainable(parts.client, shared.sampling)
    name = options.pipeline.subscription or LOCAL_SUBSCRIPTION
    with _stop_signals() as stop:
        result = start(flags, settings, options, name.format(process=args.process))
        return watch(result, parts, Heartbeat(store, settings.role, SystemClock()), stop)


def stage_settings(
    args: argparse.Namespace, shared: SharedConfig, options: PipelineOptions
) -> StageSettings:
    """What the stages need, from the command line and the run's configuration."""
    from transforms.parts import StageSettings

    return StageSettings(
        store_url=args.run,
        endpoint=",".join(args.endpoint or [_configured_endpoint(shared)]),
        trainable=True,
        recipe=options.recipe,
        role=f"rollouts-{args.process}",
        incarnation=f"{os.getpid()}-{int(SystemClock().now() * 1000)}",
        request_timeout_secs=shared.endpoint.request_timeout_secs,
        retries=shared.endpoint.retries,
        hedge_share=shared.endpoint.hedge_share,
        hedge_quantile=shared.endpoint.hedge_quantile,
        segment_tokens=shared.endpoint.segment_tokens,
        client_threads=options.pipeline.client_threads,
        flush_groups=options.pipeline.flush_groups,
    )


def build(
    pipeline: beam.Pipeline, settings: StageSettings, options: PipelineOptions, source: Any
) -> Any:
    """Draw the graph: ``source`` gives messages (bytes). Returns the manifests."""
    from transforms.parse_tasks import ParseTasks
    from transforms.rollout_pipeline import RolloutPipeline

    return (
        pipeline
        | "ReadMessages" >> source
        | "ParseTasks" >> ParseTasks(settings)
        | "RolloutPipeline"
        >> RolloutPipeline(
            settings,
            batch_groups=options.pipeline.batch_groups,
            max_wait_secs=options.pipeline.max_wait_secs,
        )
    )


def start(
    flags: list[str], settings: StageSettings, options: PipelineOptions, subscription: str
) -> Any:
    """Start the pipeline; returns Beam's result without waiting."""
    with quiet_import():
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions as BeamOptions

        pipeline = beam.Pipeline(options=BeamOptions(flags))
        build(pipeline, settings, options, beam.io.ReadFromPubSub(subscription=subscription))
        return pipeline.run()


def watch(result: Any, parts: Parts, heartbeat: Heartbeat, stop: threading.Event) -> int:
    """Beat until the pipeline fails (raises its error) or ``stop`` is set (cancels it)."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            result.wait_until_finish()
        except BaseException as e:  # re-raised below, in the main thread
            errors.append(e)
        ended.set()
        stop.set()

    threading.Thread(target=wait, daemon=True, name="pipeline").start()
    while not stop.is_set():
        heartbeat.beat("streaming", parts.waiting_for)
        parts.metrics.flush()
        stop.wait(BEAT_SECS)
    if ended.is_set():
        heartbeat.beat("failed" if errors else "finished")
        if errors:
            raise errors[0]
        return 0
    parts.stop()
    result.cancel()
    parts.recipe.close()
    parts.metrics.flush()
    heartbeat.beat("stopped")
    return 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="headrace rollouts",
        description="Stream rollouts. Further options go to Apache Beam.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--endpoint",
        action="append",
        help="an inference worker, http://host:port, or several: repeated or with commas",
    )
    parser.add_argument("--process", type=int, default=0, help="number of this process: 0, 1, ...")
    return parser.parse_known_args(argv)


def _configured_endpoint(shared: SharedConfig) -> str:
    if shared.endpoint.port == 0:
        raise ConfigError("--endpoint is missing and [endpoint] port is 0; give http://host:port")
    return f"http://{shared.endpoint.host}:{shared.endpoint.port}"


def _check_broker(flags: list[str]) -> None:
    if f"--runner={LOCAL_RUNNER}" in flags and not os.environ.get("PUBSUB_EMULATOR_HOST"):
        raise ConfigError(
            "PUBSUB_EMULATOR_HOST is not set; give host:port of the broker that `headrace control` "
            "serves (`headrace run` does this by itself)"
        )


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, while this lasts."""
    stop = threading.Event()
    names = (signal.SIGTERM, signal.SIGINT)
    before = {name: signal.signal(name, lambda *_: stop.set()) for name in names}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
