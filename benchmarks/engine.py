"""The inference engine: bare steps, batching, prefix sharing and the server, each against a peer.

Groups of 8 with the prompt and answer lengths of GSM8K (answers divided by 8, so that all arms fit
into minutes). Ratios of one run, medians over repeats, arms in turn. The floor of a step is its
matrix products alone, by the same library on the same shapes. Other people's engines: ``make
bench-peers`` and ``engine_peers``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine_peers import CASES, PEERS, against_peers
from benchmarks.engine_peers import HEADLINE as GROUP_HEADLINE
from benchmarks.engine_workload import (
    ANSWER_TOKENS,
    PlannedLengths,
    answer,
    lengths_of,
    requests_of,
    secs_of,
    served_secs,
)
from infra.clock import SystemClock
from infra.text.tokenizer import load_tokenizer
from trainer.compile_cache import enable_compile_cache
from trainer.config import ModelSection
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.scheduler import Scheduler
from trainer.model.params_io import to_named
from trainer.model.pretrained import SMOLLM2_FILE, cache_folder, load_model, resolve_model
from trainer.model.transformer import Params, linear

GROUP = 8
HEADLINE = 32
"""Slots of the figures that are reported alone."""


class Bench:
    """One model, and engines of any number of slots over it."""

    def __init__(self, args: argparse.Namespace) -> None:
        cache = cache_folder(os.environ)
        enable_compile_cache(cache)
        folder = resolve_model(ModelSection(source=args.model), cache)
        self._args = args
        self.folder, self.dtype = folder, args.dtype
        self.gguf = cache / "downloads" / SMOLLM2_FILE
        self._model, params = load_model(folder, 0)
        self._named = to_named(jax.tree.map(jnp.array, params))
        self.tokenizer = load_tokenizer(folder)
        self._engines: dict[int, DecoderEngine] = {}

    def engine(self, slots: int) -> DecoderEngine:
        """An engine that has compiled all it needs."""
        if slots not in self._engines:
            engine = self._new_engine(slots)
            secs = secs_of(lambda: list(engine.warm_up()))
            print(f"  {slots} slots compiled: {secs:.0f} s", file=sys.stderr, flush=True)
            self._engines = {slots: engine}  # one at a time: caches are large
        return self._engines[slots]

    def _new_engine(self, slots: int) -> DecoderEngine:
        engine = DecoderEngine(self._model, self._settings(slots))
        self.params = engine.load_params(self._named)
        engine.update_params(self.params, 0)
        return engine

    def _settings(self, slots: int) -> InferenceConfig:
        return InferenceConfig(slots=slots, max_len=self._args.max_len, dtype=self._args.dtype)

    def scheduler(
        self, slots: int, lengths: int | Sequence[int], **how: bool
    ) -> tuple[Scheduler, PlannedLengths]:
        """A fresh scheduler whose sample i ends as planned; a number: so many usual lengths."""
        if isinstance(lengths, int):
            lengths = lengths_of(ANSWER_TOKENS, lengths, seed=2, divisor=self._args.divisor)
        planned = PlannedLengths(self.engine(slots), lengths, self.tokenizer.eos_ids, **how)
        scheduler = Scheduler(planned, self.tokenizer, self._settings(slots), SystemClock())
        scheduler.offer_weights(planned.version + 1, "bench", self.params)
        return scheduler, planned

    # --- parts ------------------------------------------------------------------------------

    def floor(self) -> dict:
        """A step of so many busy slots, half full, against its matrix products alone."""
        engine = self._new_engine(max(self._args.slots))
        state, found = engine.init_decode_state(), {}
        half = jnp.full_like(state.position, self._args.max_len // 2)
        state = state._replace(position=half)

        def step(slots: list[int]) -> None:
            nonlocal state
            state, result = engine.generate(state, slots=slots)
            result.convert_to_numpy()

        product = jax.jit(_products)
        for busy in sorted({*self._args.slots, 2}):
            busy_slots = list(range(engine.max_concurrent_decodes))[:busy]
            x = np.ones((busy, self._model.dim), np.float32)
            secs = _medians(
                self._args.steps,
                step=lambda busy_slots=busy_slots: step(busy_slots),
                floor=lambda x=x: jax.block_until_ready(product(self.params, x)),
            )
            found[busy] = {
                "step_ms": _ms(secs["step"]),
                "floor_ms": _ms(secs["floor"]),
                "fraction_of_floor": round(secs["floor"] / secs["step"], 3),
            }
        return found

    def batching(self) -> dict:
        """Slots refilled as they become free, against batches that wait for their longest."""
        slots = HEADLINE
        count = 3 * slots

        def continuous() -> float:
            scheduler, _ = self.scheduler(slots, count)
            return secs_of(lambda: answer(scheduler, requests_of(count // GROUP, GROUP, name="c")))

        def static(plain: bool) -> float:
            scheduler, _ = self.scheduler(slots, count, plain=plain)
            requests, width = requests_of(count // GROUP, GROUP, name="s"), slots // GROUP
            return secs_of(
                lambda: [answer(scheduler, requests[i : i + width])
                         for i in range(0, len(requests), width)]
            )  # fmt: skip

        arms = self.arms(
            self._args.repeats,
            continuous=continuous,
            static=lambda: static(True),
            compacted=lambda: static(False),
        )
        tokens = sum(lengths_of(ANSWER_TOKENS, count, seed=2, divisor=self._args.divisor))
        return {
            "tokens_per_sec": {arm: round(tokens / secs, 1) for arm, secs in arms.items()},
            "continuous_over_static": round(arms["static"] / arms["continuous"], 3),
            "continuous_over_compacted": round(arms["compacted"] / arms["continuous"], 3),
        }

    def groups(self) -> dict:
        """Tokens per second, one prefill per group against one per sample."""
        found = {}
        for slots in (slots for slots in self._args.slots if slots <= HEADLINE):
            count = max(2 * slots, 32)
            tokens = sum(lengths_of(ANSWER_TOKENS, count, seed=2, divisor=self._args.divisor))

            def run(shared: bool, slots: int = slots, count: int = count) -> float:
                scheduler, _ = self.scheduler(slots, count, apart=not shared)
                requests = requests_of(count // GROUP, GROUP, name="g", shared=shared)
                return secs_of(lambda: answer(scheduler, requests))

            arms = self.arms(self._args.repeats, shared=lambda: run(True), apart=lambda: run(False))
            found[slots] = {arm: round(tokens / secs, 1) for arm, secs in arms.items()}
        return found

    def server(self) -> dict:
        """The same groups through HTTP on this machine, and stepped in this thread."""
        slots, count = HEADLINE, 2 * HEADLINE
        shares: list[float] = []

        def bare() -> float:
            scheduler, planned = self.scheduler(slots, count)
            requests = requests_of(count // GROUP, GROUP, name="b")
            secs = secs_of(lambda: answer(scheduler, requests))
            shares.append(planned.secs / secs)
            return secs

        def served() -> float:
            scheduler, _ = self.scheduler(slots, count)
            requests = requests_of(count // GROUP, GROUP, name="h")
            return served_secs(scheduler, self.tokenizer, requests)

        arms = self.arms(self._args.repeats, bare=bare, served=served)
        return {
            "secs": {arm: round(secs, 3) for arm, secs in arms.items()},
            "server_overhead": round(arms["served"] / arms["bare"] - 1, 4),
            "engine_share": round(statistics.median(shares), 4),
        }

    def arms(self, repeats: int, **arms: Callable[[], float]) -> dict[str, float]:
        """Median seconds of each, taken in turn."""
        secs: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(repeats):
            for arm, run in arms.items():
                secs[arm].append(run())
                print(f"  {arm}: {secs[arm][-1]:.2f} s", file=sys.stderr, flush=True)
        return {arm: statistics.median(values) for arm, values in secs.items()}

    def peers(self) -> dict:
        """The group workload beside other people's engines, by dtype."""
        found = {}
        for dtype in self._args.dtypes:
            settings = argparse.Namespace(**vars(self._args) | {"dtype": dtype})
            bench = self if dtype == self.dtype else Bench(settings)
            found[dtype] = against_peers(bench, settings)
        return found


def _products(params: Params, x: jax.Array) -> jax.Array:
    """All matrix products of a step, each of which needs the one before."""
    for layer in params["layers"]:
        q, k, v = (linear(x, layer[name]) for name in "qkv")
        x = x + linear(q + k.sum() + v.sum(), layer["o"])
        x = x + linear(linear(x, layer["gate"]) + linear(x, layer["up"]), layer["down"])
    return linear(x, params.get("head", params["embed"]))


def _medians(count: int, **arms: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each, in blocks in turn; the first call is left out."""
    for work in arms.values():
        work()
    secs: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(3):
        for arm, work in arms.items():
            secs[arm] += [secs_of(work) for _ in range(count)]
    return {arm: statistics.median(values) for arm, values in secs.items()}


def _ms(secs: float) -> float:
    return round(secs * 1e3, 2)


DTYPES = ("float32", "bfloat16")
PARTS = ("floor", "batching", "groups", "server", "peers")


def main(argv: list[str]) -> int:
    """Measure all parts, or those named, and print them; with ``--json`` as one object."""
    parser = argparse.ArgumentParser(prog="headrace bench engine", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default all: {', '.join(PARTS)}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("--max-len", type=int, default=256)
    parser.add_argument("--divisor", type=int, default=8, help="of the answers' lengths")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peers", default=".venv-peers", help="where make bench-peers put them")
    parser.add_argument("--against", nargs="+", default=PEERS, choices=PEERS, metavar="PEER")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES, help="beside peers")
    parser.add_argument("--cases", nargs="+", default=["32x8"], choices=CASES)
    parser.add_argument("--group-divisor", type=int, default=8, help="as --divisor, beside peers")
    parser.add_argument("--group-repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part '{unknown[0]}'; there are {', '.join(PARTS)}")
    bench, found = Bench(args), {}
    for name in args.parts or PARTS:
        found[name] = getattr(bench, name)()
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    figures = summary(found)
    lines = (f"{name:<24} {'-' if value is None else value}" for name, value in figures.items())
    print(json.dumps(figures | {"parts": found}) if args.json else "\n".join(lines))
    return 0


def summary(found: dict[str, dict]) -> dict[str, float | None]:
    """The figures of the aims; null for what was not measured and for peers that are not there."""
    groups = found.get("peers", {}).get("float32", {}).get(GROUP_HEADLINE, {})
    over = groups.get("over_ours", {})
    return {
        "vs_transformers": over.get("transformers"),
        "vs_tunix": over.get("tunix"),
        "vs_llamacpp": over.get("llamacpp"),
        "fraction_of_floor": found.get("floor", {}).get(HEADLINE, {}).get("fraction_of_floor"),
        "continuous_over_static": found.get("batching", {}).get("continuous_over_static"),
        "server_overhead": found.get("server", {}).get("server_overhead"),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
