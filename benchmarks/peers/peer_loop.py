"""What every peer's program does: load once, then answer workloads, one JSON line each.

    in   {"prompts": [[id, ...], ...], "lengths": [[tokens of each sample], ...], "slots": 32}
    out  {"secs": 12.3, "tokens": 1024}      and first, when loaded: {"ready": "tunix 0.1.7"}

A peer draws at temperature 1 from the whole vocabulary and ends a sample at its planned length.
These programs run in the peers' own environments: nothing of ours but this file is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

Batch = list[tuple[list[int], int]]
"""(prompt, tokens to draw) of each row."""
Answer = Callable[[list[list[int]], list[list[int]], int], int]
"""(prompts, lengths, slots) -> tokens drawn that were asked for."""


def serve(load: Callable[[argparse.Namespace], tuple[str, Answer]]) -> None:
    """Load by the command line's arguments and answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--gguf", default="", help="the same model as GGUF")
    parser.add_argument("--dtype", required=True, choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True)
    # Libraries print as they please: the answers' way out is not their standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ready, answer = load(parser.parse_args())
    print(json.dumps({"ready": ready}), file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        started = time.perf_counter()
        tokens = answer(work["prompts"], work["lengths"], work["slots"])
        secs = time.perf_counter() - started
        print(json.dumps({"secs": secs, "tokens": tokens}), file=out, flush=True)


def batches(
    prompts: Sequence[list[int]], lengths: Sequence[Sequence[int]], slots: int
) -> Iterator[Batch]:
    """For peers that batch statically: rows sorted by the prompt's length, so that padding is
    little. How long an answer becomes is not known before it is there."""
    rows = [(p, n) for p, own in zip(prompts, lengths, strict=True) for n in own]
    rows.sort(key=lambda row: len(row[0]))
    return (rows[i : i + slots] for i in range(0, len(rows), slots))
