"""`headrace bench NAME`: every number in docs/benchmarks.md comes from one of these."""

from __future__ import annotations

import importlib
import sys

from infra.config import nearest
from infra.contracts.errors import ConfigError

BENCHMARKS = {
    "engine": "the inference engine: bare steps, batching, prefix sharing, the server",
    "loop": "the whole loop against the same update done in one process",
    "objectives": "how each objective learns the tiny task, fresh and stale, corrected or not",
    "trainer": "a training step against torch, against padded rows, against its matrix products",
    "worker-load": "two hundred callers of one worker, swaps, pauses, callers that leave",
    "storage": "weights, deltas, the weight server, shards, polling, each against a plain peer",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: headrace bench NAME [--json] ...\n")
        print("\n".join(f"  {name:<11} {text}" for name, text in BENCHMARKS.items()))
        return 0
    if argv[0] not in BENCHMARKS:
        raise ConfigError(f"no benchmark '{argv[0]}'; {nearest(argv[0], BENCHMARKS)}")
    return importlib.import_module(f"benchmarks.{argv[0].replace('-', '_')}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
