"""What a training step costs, against torch's on the same sequences, and against its own limit.

SmolLM2-135M, float32, groups that share a prompt, with GSM8K's lengths. Three arms, each in a
process of its own, so that peak memory is each one's: ours packed (what the trainer does), ours
with a row per sequence, and torch with transformers as TRL runs it (``make bench-peers`` installs
it). Ratios of seconds are ratios per useful token: the sequences are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_workload import ANSWER_TOKENS, QUESTION_TOKENS, lengths_of
from infra.contracts.errors import HeadraceError
from pipelines.launcher.role_process import ENVIRONMENT
from trainer.config import ModelSection
from trainer.model.pretrained import cache_folder, resolve_model

PEER = Path(".venv-peers/transformers/bin/python")
VOCABULARY = 49_000


def main(argv: list[str]) -> int:
    """Run the arms and print the table, or with ``--json`` one object."""
    parser = argparse.ArgumentParser(prog="headrace bench trainer", description=__doc__)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--n", type=int, default=4, help="answers of a group")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if min(args.groups, args.n, args.repeats, args.threads) < 1:
        parser.error("--groups, --n, --repeats and --threads must be at least 1")
    work = workload(args.groups, args.n) | {"repeats": args.repeats}
    ours = {layout: _ours(work | {"layout": layout}) for layout in ("packed", "padded")}
    result = _result(work, ours, _torch(work, args.threads))
    print(json.dumps(result) if args.json else "\n".join(f"{k:<20} {v}" for k, v in result.items()))
    return 0


def workload(groups: int, n: int) -> dict[str, Any]:
    """Random ids; what is learned does not matter to the clock."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCABULARY, size).tolist()
               for size in lengths_of(QUESTION_TOKENS, groups, seed=1)]  # fmt: skip
    lengths = lengths_of(ANSWER_TOKENS, groups * n, seed=2)
    return {
        "prompts": [prompts[i // n] for i in range(groups * n)],
        "answers": [rng.integers(1, VOCABULARY, size).tolist() for size in lengths],
        "advantages": [1.0 if i % 2 else -1.0 for i in range(groups * n)],
    }


def _ours(work: dict) -> dict[str, Any]:
    return _child([sys.executable, "-m", "benchmarks.trainer_step"], work, ENVIRONMENT)


def _torch(work: dict, threads: int) -> dict[str, Any] | None:
    if not PEER.exists():
        return None
    folder = resolve_model(ModelSection(source="smollm2-135m"), cache_folder(os.environ))
    more = {"model": str(folder), "threads": threads, "dtype": "float32"}
    return _child([str(PEER), "-m", "benchmarks.peers.torch_step"], work | more, {})


def _child(words: list[str], work: dict, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        words,
        input=json.dumps(work),
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    if done.returncode:
        raise HeadraceError(f"{' '.join(words)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _result(work: dict, ours: dict[str, dict], torch: dict | None) -> dict[str, Any]:
    packed, padded = (statistics.median(ours[k]["secs"]) for k in ("packed", "padded"))
    useful = sum(map(len, work["answers"]))
    result: dict[str, Any] = {
        "vs_torch": None,
        "vs_tunix": None,
        "memory_vs_torch": None,
        "fraction_of_limit": round(ours["packed"]["products_secs"] / packed, 3),
        "packed_over_padded": round(padded / packed, 2),
        "packed_secs": round(packed, 2),
        "padded_secs": round(padded, 2),
        "answer_tokens": useful,
        "packed_row_tokens": ours["packed"]["row_tokens"],
        "padded_row_tokens": ours["padded"]["row_tokens"],
        "peak_bytes": ours["packed"]["rss_bytes"],
    }
    if torch is not None:
        secs = statistics.median(torch["secs"])
        result |= {
            "vs_torch": round(secs / packed, 2),
            "memory_vs_torch": round(ours["packed"]["rss_bytes"] / torch["rss_bytes"], 2),
            "torch_secs": round(secs, 2),
            "torch_peak_bytes": torch["rss_bytes"],
            "torch": torch["ready"],
        }
    return result
