"""Our engine and other people's, on the same groups, in turn, with the same threads.

Each peer is a program in an environment of its own (``make bench-peers``) that answers workloads
on its standard input. What each may do, and does: transformers and tunix batch statically, with
the prompts sorted by length; llama.cpp refills its slots and computes a group's prompt once, as we
do. All draw at temperature 1; only ours tells log-probs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine_workload import (
    GroupWork,
    answer,
    group_work,
    request_of,
    secs_of,
    served_secs,
)

if TYPE_CHECKING:
    from benchmarks.engine import Bench

ROOT = Path(__file__).parents[1]
PEERS = ("transformers", "tunix", "llamacpp")
CASES = {
    "32x8": (32, 8, 8),
    "32x16": (32, 4, 16),
    "8x8": (8, 3, 8),
    "1x8": (1, 1, 8),
    "96x8": (96, 24, 8),
}
"""Samples decoded together, groups, samples per group; named after the first and the last."""
HEADLINE = "32x8"


class PeerFailed(Exception):
    """A peer's program ended without an answer; its output says why."""


class Peer:
    """One peer's program, loaded and waiting."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self._log = name, log
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def read(self) -> dict[str, Any]:
        """Its next line. Raises ``PeerFailed`` when it has ended instead."""
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise PeerFailed(f"{self.name}: {lines[-1]} (all of it: {self._log})")
        return json.loads(line)

    def secs(self, work: GroupWork, slots: int) -> float:
        """Seconds in which it answered ``work``."""
        asked = {"prompts": work.prompts, "lengths": work.lengths, "slots": slots}
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # ended: ``read`` says why
        found = self.read()
        if found["tokens"] != work.tokens:
            raise PeerFailed(f"{self.name}: {found['tokens']} tokens, not {work.tokens}")
        return found["secs"]

    def close(self) -> None:
        """Its input ends, and so does it."""
        self._process.communicate()


@contextmanager
def loaded_peers(args: argparse.Namespace, bench: Bench) -> Iterator[list[Peer]]:
    """Those peers that are installed and can load the model; says on stderr which cannot."""
    found: list[Peer] = []
    place = Path(args.peers).absolute()
    options = ["--model", str(bench.folder), "--gguf", str(bench.gguf), "--dtype", bench.dtype]
    options += ["--max-len", str(args.max_len), "--threads", str(len(os.sched_getaffinity(0)))]
    try:
        for name in args.against:
            python = place / name / "bin" / "python"
            if not python.is_file():
                print(f"  {name}: not installed (make bench-peers)", file=sys.stderr, flush=True)
                continue
            command = [str(python), "-m", f"benchmarks.peers.{name}_peer", *options]
            peer = Peer(name, command, place / f"{name}.log")
            try:
                print(f"  {peer.read()['ready']}, {bench.dtype}", file=sys.stderr, flush=True)
                found.append(peer)
            except PeerFailed as e:
                peer.close()
                print(f"  {e}", file=sys.stderr, flush=True)
        yield found
    finally:
        for peer in found:
            peer.close()


def against_peers(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Each case's seconds, tokens per second, and seconds over ours, in the bench's dtype."""
    found: dict[str, Any] = {}
    with loaded_peers(args, bench) as peers:
        for case in args.cases:
            try:
                found[case] = _case(bench, args, peers, case)
            except PeerFailed as e:
                found[case] = {"failed": str(e)}
            print(f"  {case}: {json.dumps(found[case])}", file=sys.stderr, flush=True)
    return found


def _case(bench: Bench, args: argparse.Namespace, peers: list[Peer], case: str) -> dict[str, Any]:
    slots, groups, n = CASES[case]
    work = group_work(bench.tokenizer, groups, n, divisor=args.group_divisor, room=args.max_len)
    arms: dict[str, Callable[[], float]] = {"ours": lambda: _ours(bench, work, slots)}
    if case == HEADLINE:
        arms["served"] = lambda: _served(bench, work, slots)
    for peer in peers:
        arms[peer.name] = functools.partial(peer.secs, work, slots)
        if peer.name == "tunix":
            peer.secs(work, slots)  # compiles for every shape of a batch
    bench.engine(max(2, slots))
    secs = bench.arms(args.group_repeats, **arms)
    return {
        "tokens": work.tokens,
        "prompt_tokens": sum(map(len, work.prompts)),
        "tokens_per_sec": {arm: round(work.tokens / s, 1) for arm, s in secs.items()},
        "over_ours": {arm: round(s / secs["ours"], 3) for arm, s in secs.items()},
    }


def _ours(bench: Bench, work: GroupWork, slots: int) -> float:
    scheduler, _ = bench.scheduler(max(2, slots), work.flat_lengths)
    requests = work.requests("g")
    if slots == 1:  # the engine has two slots at least: one sample at a time, its prompt with it
        lone = [request_of(r.messages[0].content, [s], "l") for r in requests for s in r.seeds]
        return secs_of(lambda: [answer(scheduler, [request]) for request in lone])
    return secs_of(lambda: answer(scheduler, requests))


def _served(bench: Bench, work: GroupWork, slots: int) -> float:
    scheduler, _ = bench.scheduler(slots, work.flat_lengths)
    return served_secs(scheduler, bench.tokenizer, work.requests("h"))
