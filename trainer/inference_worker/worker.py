"""The inference worker put together: engine, scheduler, follower, server, heartbeats, metrics."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infra.clock import Clock
from infra.contracts.errors import ConfigError
from infra.contracts.manifests import WeightManifest
from infra.heartbeats import Heartbeat
from infra.hints import HintListener, send_hint
from infra.metrics import MetricsWriter
from infra.storage.object_store import ObjectStore
from infra.text.tokenizer import load_tokenizer
from infra.weights.cast import dequantised
from infra.weights.open_reader import open_reader
from infra.weights.stored_weights import StoredWeights
from infra.weights.sync_times import PARTS, PREFIX, SyncTimes
from infra.weights.weight_follower import WeightFollower
from trainer.compile_cache import enable_compile_cache
from trainer.config import TrainerConfig
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.http.http_backend import Backend
from trainer.inference_worker.http.http_limits import HttpLimits
from trainer.inference_worker.observer import Observer
from trainer.inference_worker.scheduler import Scheduler
from trainer.inference_worker.server import WorkerServer
from trainer.inference_worker.totals import Totals, rates
from trainer.model.pretrained import load_config, resolve_model

BEAT_SECS = 1.0
DRAIN_POLL_SECS = 0.1
ANSWER_SECS = 1.0

Mailbox = queue.SimpleQueue[BaseException | None]
"""How threads and signals reach the main thread."""


class Worker:
    """One process's parts. ``serve`` runs them."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        config: TrainerConfig,
        cache: Path,
        clock: Clock,
        role: str,
        host: str,
        port: int,
        weights_server: str = "",
        limits: HttpLimits | None = None,
        token: str = "",
    ) -> None:
        """Bind the port and prepare the model's configuration; compiles and loads nothing yet.

        ``weights_server``: instead of ``[weights] server``, e.g. this host's relay; ``token``:
        what callers must show, if anything.

        Raises:
            ConfigError: the port is taken, or the model cannot be resolved.
        """
        settings = config.own.inference
        # Bind first: a taken port must not cost the user a compilation.
        self._server = WorkerServer(host, port, None, limits=limits, token=token, clock=clock)
        self._settings, self._clock, self._role, self._store = settings, clock, role, store
        enable_compile_cache(cache)
        folder = resolve_model(config.own.model, cache)
        tokenizer = load_tokenizer(folder)
        self._engine = DecoderEngine(load_config(folder), settings)
        self._tokenizer_digest = tokenizer.digest
        self._heartbeat = Heartbeat(store, role, clock)
        self._metrics = MetricsWriter(store, role, f"{os.getpid()}-{int(clock.now())}", clock)
        self._sync_secs: dict[str, float] = {}
        times = SyncTimes(clock, self._synced)
        self._scheduler = Scheduler(
            self._engine, tokenizer, settings, clock, _Observer(role, times)
        )
        served = config.own.weights
        weights = open_reader(
            StoredWeights(store, config.shared.run.name, clock=clock),
            weights_server or served.server,
            token_file=served.token_file,
            ca_file=served.ca_file,
            clock=clock,
        )
        self._follower = WeightFollower(weights, self._use, times, clock)
        self._mailbox: Mailbox = queue.SimpleQueue()
        self._server.backend = self._backend = Backend(
            scheduler=self._scheduler,
            tokenizer=tokenizer,
            model=config.shared.run.name,
            more_health=self._more_health,
            drain=lambda: self._mailbox.put(None),
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are really bound."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def _more_health(self) -> dict[str, Any]:
        return {"weights": self._follower.trouble or "ok", "sync_secs": self._sync_secs}

    def _synced(self, row: dict[str, float]) -> None:
        """A version has produced its first token."""
        parts = (*PARTS, "sync")
        self._sync_secs = {part: round(row[f"{PREFIX}{part}_secs"], 6) for part in parts}
        self._metrics.emit(row)

    def _use(self, manifest: WeightManifest, arrays: dict[str, np.ndarray]) -> None:
        """Put a version onto the device, beside the one in use, and offer it."""
        if manifest.tokenizer_digest not in ("", self._tokenizer_digest):
            raise ConfigError(
                f"version {manifest.version} was made with tokenizer {manifest.tokenizer_digest}, "
                f"this worker has {self._tokenizer_digest}; give both the same [model]"
            )
        # Wait for the copy here, so that the engine's thread never does.
        arrays = dequantised(arrays, manifest)
        params = jax.block_until_ready(self._engine.load_params(arrays))
        self._scheduler.offer_weights(manifest.version, manifest.digest, params)

    def serve(self, mailbox: Mailbox, pinned: int | None = None) -> None:
        """Serve until something is put into ``mailbox``: None to stop, an exception to raise.

        Threads that die put theirs there. To stop is to drain first: what runs is finished within
        ``HttpLimits.drain_secs``, new requests go elsewhere; a second None ends that at once.
        """
        self._mailbox, stopped = mailbox, threading.Event()
        # Health checks are answered while we compile; requests queue, there are no weights yet.
        threads = [_start("http", self._server.serve_forever, mailbox)]
        self._heartbeat.beat("compiling")
        for _ in self._engine.warm_up():
            if not mailbox.empty():
                break
        threads.append(_start("decode", self._scheduler.run, mailbox))
        if pinned is None:
            threads.append(_start("weights", lambda: self._follow(stopped), mailbox))
        else:
            self._follower.pin(pinned, self._store)
        host, port = self.address
        print(f"serving on http://{host}:{port}", flush=True)
        failure = self._report_until(mailbox) or self._drain(mailbox)
        stopped.set()
        self._scheduler.stop()
        self._server.wait_idle(ANSWER_SECS)  # those that are told so now
        self._server.shutdown()
        self._server.server_close()
        for thread in threads:
            thread.join()
        self._heartbeat.beat("stopped")
        self._metrics.flush()
        if failure is not None:
            raise failure

    def _drain(self, mailbox: Mailbox) -> BaseException | None:
        """Let what runs finish; return what was put into the mailbox meanwhile."""
        self._server.drain()
        end = self._clock.now() + self._server.limits.drain_secs
        while not self._server.wait_idle(DRAIN_POLL_SECS) and self._clock.now() < end:
            if not mailbox.empty():
                return mailbox.get()
        return None

    def _follow(self, stopped: threading.Event) -> None:
        with HintListener(self._role) as wake:
            self._follower.run(wake, stopped, self._settings.poll_secs)

    def _report_until(self, mailbox: Mailbox) -> BaseException | None:
        """Beat and write metrics every second; return what was put into the mailbox."""
        before, at = Totals(), self._clock.now()
        while True:
            try:
                message, ended = mailbox.get(timeout=BEAT_SECS), True
            except queue.Empty:
                message, ended = None, False
            now, totals = self._clock.now(), dataclasses.replace(self._scheduler.totals)
            self._metrics.emit(rates(before, totals, max(now - at, 1e-3), self._settings.slots))
            before, at = totals, now
            if ended:
                return message
            self._beat()

    def _beat(self) -> None:
        health = self._backend.health()
        waiting = "the first weights" if health["version"] < 0 else ""
        if not waiting and not health["busy"]:
            waiting = "newer weights" if health["queued"] else "requests"
            if health["queued"] and self._follower.trouble:
                waiting = f"newer weights ({self._follower.trouble})"
        if health["paused"]:
            waiting = f"a resume (paused, {health['paused']})"
        numbers = {key: health[key] for key in ("version", "busy", "queued", "slots")}
        self._heartbeat.beat("waiting" if waiting else "decoding", waiting, **numbers)


class _Observer(Observer):
    """Times each version, and wakes the follower when a request needs a newer one."""

    def __init__(self, role: str, times: SyncTimes) -> None:
        self._role, self._times = role, times

    def behind(self, version: int) -> None:
        send_hint(self._role, version=version)

    def swapped(self, version: int) -> None:
        self._times.mark(version, "swapped")

    def first_token(self, version: int) -> None:
        self._times.mark(version, "first_token")


def _start(name: str, work: Callable[[], None], mailbox: Mailbox) -> threading.Thread:
    """Run ``work`` in a thread; whatever ends it early goes to the mailbox."""

    def guarded() -> None:
        try:
            work()
        except BaseException as e:  # the main thread raises it
            mailbox.put(e)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
