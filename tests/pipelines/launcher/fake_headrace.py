"""Small programs in the place of the roles: ``fake_headrace.py SCENARIO COMMAND ...``.

They do what the launcher can see of the real ones: versions, shards, ledger, control files, the
worker's health. A scenario makes one of them misbehave once. Each holds ``$ALIVE`` (a FIFO) open
for writing, so that whoever reads it sees its end exactly when every child is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from infra.config import read_toml
from infra.storage import run_layout
from infra.storage.local_store import LocalStore

PER_STEP = 2
PAUSE_SECS = 0.01


def check(config: str) -> int:
    tree = read_toml(config)
    if tree.get("sampling", {}).get("n") == 1:
        print("headrace train: n = 1 has no group advantage; set n >= 2", file=sys.stderr)
        return 2
    from infra.run_config import TRAINER_SECTIONS

    sections = {name: tree.get(name, {}) for name in TRAINER_SECTIONS}
    sections["checkpoint"] = {"keep_versions": 4, "keep_checkpoints": 2, "every_steps": 5}
    sections["warm_start"] = {"target": 0.0, **sections["warm_start"]}
    report = {"parameters": 10, "version_bytes": 40, "checkpoint_bytes": 120, "objective": "grpo"}
    print(json.dumps(report | {"sections": sections}))
    return 0


def once(run: Path, name: str) -> bool:
    """True the first time in this run."""
    marker = run / f"once-{name}"
    if marker.exists():
        return False
    marker.touch()
    return True


def train(run: Path, scenario: str) -> int:
    import numpy as np

    from infra.clock import SystemClock
    from infra.contracts.manifests import LedgerEntry
    from infra.heartbeats import Heartbeat
    from infra.ledger import ledger
    from infra.ledger.group_index import GroupIndex
    from infra.weights.stored_weights import StoredWeights

    store, updates = LocalStore(run), read_toml(run / "run.toml")["stop"]["updates"]
    weights, index = StoredWeights(store, "fake"), GroupIndex(store)
    latest = weights.latest()
    version = -1 if latest is None else latest.version
    beat = Heartbeat(store, "trainer", SystemClock())
    if version < 0:
        weights.publish(0, {"w": np.zeros(2, np.float32)})
        version = 0
    while version < updates:
        beat.beat("waiting", "rollouts", version=version)
        if scenario == "stuck" or store.read_with_token(run_layout.command("drain")):
            pause_until_signalled() if scenario == "stuck" else None
            return 0
        index.refresh()
        ready = sorted(index.waiting.values(), key=lambda c: c.entry.admission_index)[:PER_STEP]
        entry = ledger.read(store, version + 1)
        if entry is None and len(ready) < PER_STEP:
            time.sleep(PAUSE_SECS)
            continue
        entry = entry or LedgerEntry(
            step=version + 1,
            groups=tuple((c.entry.group_id, c.manifest.data_digest) for c in ready),
            lag_max=0,
            incarnation="fake",
            settings_digest="fake",
            created_at=time.time(),
        )
        ledger.append(store, entry)
        if version == 6 and scenario == "accidents":
            while not store.read_with_token(run_layout.command("drain")):
                time.sleep(PAUSE_SECS)
            return 0
        if version == 1 and scenario == "accidents" and once(run, "trainer"):
            os.kill(os.getpid(), signal.SIGKILL)
        if version == 1 and scenario in ("interrupt", "killed"):
            Path(os.environ["READY"]).write_text("ready\n")
            pause_until_signalled()
        version += 1
        weights.publish(version, {"w": np.full(2, version, np.float32)})
    return 0


def control(run: Path, scenario: str) -> int:
    from infra.contracts.json_codec import from_json, to_json
    from infra.contracts.manifests import ControlState
    from infra.ledger.group_index import GroupIndex
    from infra.weights.stored_weights import StoredWeights

    store, updates = LocalStore(run), read_toml(run / "run.toml")["stop"]["updates"]
    state = ControlState(run="fake", epoch=1, next_index=updates * PER_STEP)
    found = store.read_with_token(run_layout.CONTROL_STATE)
    if found is None:
        assert store.compare_and_swap(run_layout.CONTROL_STATE, to_json(state), None)
    elif from_json(ControlState, found[0]).next_index < state.next_index:
        assert store.compare_and_swap(run_layout.CONTROL_STATE, to_json(state), found[1])
    weights, index = StoredWeights(store, "fake"), GroupIndex(store)
    reason = "no_trainable_groups" if scenario == "hopeless" else ""
    while not reason:
        latest = weights.latest()
        drained = store.read_with_token(run_layout.command("drain"))
        index.refresh()
        if latest and latest.version >= updates:
            reason = "updates_reached"
        elif drained and sum(index.counts.values()) >= state.next_index:
            reason = "drained"
        time.sleep(PAUSE_SECS)
    done = {"reason": reason, "version": 0}
    store.create(run_layout.CONTROL_DONE, json.dumps(done).encode())
    if scenario == "hopeless":
        store.create(run_layout.command("drain"), b"{}")
    return 0


def rollouts(run: Path, process: int, scenario: str) -> int:
    from infra.shards.shard_writer import write_shard
    from tests.builders import make_group

    store, updates = LocalStore(run), read_toml(run / "run.toml")["stop"]["updates"]
    assert os.environ["PUBSUB_EMULATOR_HOST"]
    for index in range(updates * PER_STEP) if process == 0 and scenario != "hopeless" else ():
        write_shard(store, [make_group(index)], recipe_digest="recipe-digest", now=time.time())
        if index == 1 and scenario == "accidents" and once(run, "rollouts"):
            os.kill(os.getpid(), signal.SIGKILL)
    pause_until_signalled()
    return 0


def serve(run: Path, port: int) -> int:
    from infra.weights.stored_weights import StoredWeights

    weights = StoredWeights(LocalStore(run), "fake")

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            latest = weights.latest()
            body = json.dumps({"version": -1 if latest is None else latest.version}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    HTTPServer(("127.0.0.1", port), Health).serve_forever()
    return 0


def evaluate(run: Path, version: int) -> int:
    with (run / "evaluated").open("a") as file:
        print(version, file=file)
    passes = min(1 + version, 4)
    print("some progress")
    found = {"version": version, "problems": 4, "passes": passes, "pass_rate": passes / 4}
    print(json.dumps({**found, "interval": [0.1, 0.9], "pass_at_k": {"1": 0.5}}))
    return 0


def pause_until_signalled() -> None:
    signal.pause()


def main(scenario: str, command: str, argv: list[str]) -> int:
    if alive := os.environ.get("ALIVE"):
        os.open(alive, os.O_WRONLY)  # kept open until this process is gone
    words, run = dict(zip(argv[1::2], argv[2::2], strict=False)), Path(argv[0])
    match command:
        case "train":
            return check(argv[0]) if "--check" in argv else train(run, scenario)
        case "sft":
            Path(words["--out"]).mkdir()
            return 0
        case "serve":
            return serve(run, int(words["--port"]))
        case "control":
            return control(run, scenario)
        case "rollouts":
            return rollouts(run, int(words["--process"]), scenario)
        case "evaluate":
            return evaluate(run, int(words["--version"]))
    raise AssertionError(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
