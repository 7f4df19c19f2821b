"""``headrace bench worker-load``: two hundred callers of one worker over loopback, for minutes.

The real server and engine with a tiny model in this process, the callers in another. New weights
every two seconds, callers that leave, a queue that is too short, pauses of every kind, answers in
segments. Every request is one of a catalogue whose answers under each set of weights were computed
beforehand, alone: so a lost, mixed or stale answer shows. Exit code 1 if anything is off.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass

import jax
import numpy as np

from benchmarks.worker_load_callers import Catalogue, Digits, call_for, catalogue_of
from infra.clock import SystemClock
from infra.contracts.records import GenerateReply
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.http.http_backend import Backend
from trainer.inference_worker.http.http_limits import HttpLimits
from trainer.inference_worker.scheduler import Scheduler
from trainer.inference_worker.server import WorkerServer
from trainer.model.config import ModelConfig
from trainer.model.params_io import to_named
from trainer.model.transformer import init_params

MODEL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=20, max_len=64)
WEIGHTS = 3
"""Version v is set v % 3."""
PAUSES = ("in_place", "finish", "abort")
MOST_NEW_OBJECTS = 2_000
MOST_GROWTH_MB = 8.0
SETTLED_SECS = 60.0
"""Resident memory says nothing about a shorter load: the allocator is still filling its pools."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much and how long."""

    secs: float = 300.0
    callers: int = 200
    slots: int = 16
    max_queue: int = 96
    swap_secs: float = 2.0
    pause_secs: float = 11.0
    swap: str = "boundary"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench worker-load", description=__doc__)
    parser.add_argument("--secs", type=float, default=300.0)
    parser.add_argument("--callers", type=int, default=200)
    parser.add_argument("--swap", choices=("boundary", "in_flight"), default="boundary")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    found = measure(Load(secs=args.secs, callers=args.callers, swap=args.swap))
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<22} {value}" for name, value in found.items()))
    return 0 if not found["problems"] else 1


class Bench:
    """One worker, warmed up, and the sets of weights it is given in turn."""

    def __init__(self, load: Load) -> None:
        self._load = load
        settings = InferenceConfig(
            slots=load.slots,
            max_len=48,
            prefill_tokens=64,
            swap=load.swap,
            max_queue=load.max_queue,
        )
        self._engine = DecoderEngine(MODEL, settings)
        for _ in self._engine.warm_up():
            pass
        self.scheduler = Scheduler(self._engine, Digits(), settings, SystemClock())
        drawn = jax.jit(lambda key: init_params(MODEL, key))
        sets = [to_named(drawn(jax.random.key(i))) for i in range(WEIGHTS)]
        # Far from uniform, and from each other: a stale token does not go unnoticed.
        self._sets = [{name: 3 * array for name, array in s.items()} for s in sets]
        self.version = -1

    def offer(self) -> None:
        """Publish the next version."""
        self.version += 1
        arrays = self._sets[self.version % WEIGHTS]
        params = jax.block_until_ready(self._engine.load_params(arrays))
        self.scheduler.offer_weights(self.version, f"set-{self.version % WEIGHTS}", params)

    def catalogue(self) -> Catalogue:
        """Every request answered alone, under every set."""
        requests = catalogue_of(MODEL.vocab)
        answers: list[list[GenerateReply]] = []
        for _ in range(WEIGHTS):
            self.offer()
            found = []
            for request in requests:
                future = self.scheduler.submit(request)
                while self.scheduler.step():
                    pass
                found.append(future.result(0))
            answers.append(found)
        return Catalogue(requests=requests, answers=answers)


def measure(
    load: Load, bench: Bench | None = None, catalogue: Catalogue | None = None
) -> dict[str, object]:
    """Run it, on a worker made for it if none is given; ``problems`` says what is off.

    Afterwards the worker is stopped.
    """
    bench = bench or Bench(load)
    catalogue = catalogue or bench.catalogue()
    limits = HttpLimits(connections=4 * load.callers)
    backend = Backend(scheduler=bench.scheduler, tokenizer=Digits())
    server = WorkerServer("127.0.0.1", 0, backend, limits=limits)
    threads = [threading.Thread(target=t) for t in (server.serve_forever, bench.scheduler.run)]
    for thread in threads:
        thread.start()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    told_to = (theirs, server.server_address[1], catalogue, load.secs, load.callers)
    callers = spawn.Process(target=call_for, args=told_to)
    callers.start()
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, secs, **_: "backend_compile" in event and compiled.append(event)
    )
    try:
        samples = _watch(bench, load, ours)
        told = ours.recv()
        callers.join()
        server.wait_idle(20)
        load_after = bench.scheduler.load()
    finally:
        bench.scheduler.stop()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()
    found = _report(load, told, samples, compiled)
    found |= {"swaps": bench.scheduler.totals.swaps, "left_over": sum(load_after)}
    found["tokens_per_sec"] = round(bench.scheduler.totals.tokens / load.secs)
    return found


def _watch(bench: Bench, load: Load, callers: object) -> list[tuple[float, float, int, int]]:
    """Swap and pause until the callers are done; (secs, MB, objects, files) now and then."""
    started = time.monotonic()
    swap_at, pause_at, pauses = load.swap_secs, load.pause_secs, 0
    sample_at, samples = load.secs / 3, []
    while not callers.poll(0.05):
        secs = time.monotonic() - started
        if secs >= swap_at:
            swap_at += load.swap_secs
            bench.offer()
        if secs >= pause_at:
            pause_at += load.pause_secs
            bench.scheduler.pause(PAUSES[pauses % len(PAUSES)])
            time.sleep(0.2)
            bench.scheduler.resume()
            pauses += 1
        if secs >= sample_at and secs < load.secs:
            sample_at += load.secs / 30
            gc.collect()
            files = len(os.listdir("/proc/self/fd"))
            samples.append((secs, _resident_mb(), len(gc.get_objects()), files))
    return samples


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _report(load: Load, told: dict, samples: list, compiled: list[str]) -> dict[str, object]:
    secs, mb, objects, files = np.array(samples).T
    slope = float(np.polyfit(secs, mb, 1)[0]) * 60 if len(secs) > 1 else 0.0
    half = len(objects) // 2
    growth = int(np.median(objects[half:]) - np.median(objects[:half])) if half else 0
    checks = (
        (not told["wrong"], f"{told['wrong']} wrong answers: {told['example']}"),
        (not told["lost"], f"{told['lost']} requests without an answer: {told['loss']}"),
        (not compiled, f"{len(compiled)} compilations under load"),
        (growth < MOST_NEW_OBJECTS, f"{growth} more objects in the second half"),
        (
            load.secs < SETTLED_SECS or slope * load.secs / 60 < MOST_GROWTH_MB,
            f"memory grows by {slope:.2f} MB a minute",
        ),
    )
    return {
        **asdict(load),
        **told,
        "compilations": len(compiled),
        "resident_mb": round(float(mb[-1]), 1),
        "mb_per_minute": round(slope, 3),
        "objects_growth": growth,
        "files": [int(files.min()), int(files.max())],
        "problems": [text for ok, text in checks if not ok],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
