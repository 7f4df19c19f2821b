"""Storage and the parameter server: every part against a plain peer, medians, ratios of one run.

Weights of 135 M parameters against a plain file of the same bytes and against Orbax; one Adam step
as a delta; the weight server against a loopback socket; shards against plain Parquet; what it costs
to follow 100 to 100,000 shards.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from benchmarks.storage_flight import SIZES, measure_flight, measure_readers
from benchmarks.storage_orbax import measure_orbax
from benchmarks.storage_shards import measure_poll, measure_rows
from benchmarks.storage_weights import measure_delta, measure_publish_fetch

SHARDS = (100, 10_000, 100_000)
PARTS: dict[str, Callable[[], dict]] = {
    "float32": lambda: measure_publish_fetch(dtype="float32"),
    "bfloat16": lambda: measure_publish_fetch(dtype="bfloat16"),
    "int8": lambda: measure_publish_fetch(dtype="int8"),
    "orbax": measure_orbax,
    "delta_1e-6": lambda: measure_delta(lr=1e-6),
    "delta_1e-5": lambda: measure_delta(lr=1e-5),
    "flight": lambda: measure_flight(SIZES["bf16"], repeats=7),
    "flight_float32": lambda: measure_flight(SIZES["fp32"], repeats=7),
    "readers": lambda: measure_readers(SIZES["bf16"]),
    "rows": measure_rows,
    "poll": lambda: measure_poll(SHARDS),
}


def main(argv: list[str]) -> int:
    """Measure all parts, or those named, and print them; with ``--json`` as one object."""
    parser = argparse.ArgumentParser(prog="headrace bench storage", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default all: {', '.join(PARTS)}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part '{unknown[0]}'; there are {', '.join(PARTS)}")
    found: dict[str, dict] = {}
    for name in args.parts or PARTS:
        found[name] = PARTS[name]()
        print(f"{name}: {_short(found[name])}", file=sys.stderr, flush=True)
    print(json.dumps(summary(found) | {"parts": found}) if args.json else _table(summary(found)))
    return 0


def summary(found: dict[str, dict]) -> dict[str, float]:
    """The figures of the aims, as far as their parts were measured."""
    wanted = {
        "publish_over_raw_write": ("float32", "publish_over_raw_write"),
        "fetch_over_raw_read": ("float32", "fetch_over_raw_read"),
        "publish_over_orbax_save": ("orbax", "publish_over_orbax_save"),
        "fetch_over_orbax_restore": ("orbax", "fetch_over_orbax_restore"),
        "delta_bytes_fraction": ("delta_1e-6", "delta_bytes_fraction"),
        "flight_over_socket": ("flight", "flight_over_socket"),
    }
    figures = {
        name: round(found[part][key], 4) for name, (part, key) in wanted.items() if part in found
    }
    if "poll" in found:
        figures["poll_ms_at_100k_shards"] = round(found["poll"][str(SHARDS[-1])]["idle_poll_ms"], 3)
    return figures


def _short(values: dict) -> str:
    return json.dumps(values, default=str)


def _table(figures: dict[str, float]) -> str:
    return "\n".join(f"{name:<26} {value:>9.3f}" for name, value in figures.items())
