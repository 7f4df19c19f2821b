"""``headrace control`` as a process: ready, served, stopped; and what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.pubsub_v1 import SubscriberClient
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from infra.contracts.errors import ConfigError
from infra.contracts.json_codec import from_json
from infra.contracts.manifests import ControlState
from infra.contracts.task_message import decode_tasks
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.weights.latest_pointer import LatestPointer, advance_latest
from pipelines.controller.broker import subscription
from pipelines.controller.main import main

RUN_TOML = """
[run]
name = "small"

[prompts]
source = "addition"
role = "text"

[admission]
groups_per_step = 4

[pipeline]
processes = 2
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / run_layout.RUN_CONFIG).write_text(RUN_TOML)
    return tmp_path


def start(run: Path, *args: str) -> subprocess.Popen[str]:
    """Start the role and wait until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.commands", "control", str(run), *args],
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "HEADRACE_HINTS"},
    )
    process.ready = process.stderr.readline()
    return process


def test_serves_a_run_and_stops_cleanly(run: Path) -> None:
    store = LocalStore(str(run))
    advance_latest(store, LatestPointer(version=0, digest="d"))
    process = start(run)
    assert process.ready.startswith("controller of small, epoch 1: 717 training prompts, broker on")
    channel = grpc.insecure_channel(process.ready.split()[-1])
    client = SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))
    tasks: list = []
    while len(tasks) < 4:
        answer = client.pull(subscription=subscription(1), max_messages=10, timeout=30.0)
        for received in answer.received_messages:
            tasks += decode_tasks(received.message.data)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 76 and "start again to go on" in process.stderr.read()
    process.stderr.close()
    state = from_json(ControlState, store.read(run_layout.CONTROL_STATE))
    assert [f.group_id for f in state.flights] == [t.group_id for t in tasks]


def test_a_port_in_use(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 cannot be opened"):
            main([str(run), "--port", str(port)])
    assert LocalStore(str(run)).read_with_token(run_layout.CONTROL_STATE) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no run there"),
        ("[run", "cannot be read as TOML"),
        (RUN_TOML + "threads = 3\n[rum]\n", r"unknown section \[rum\]; did you mean 'run'"),
        (RUN_TOML.replace("= 2", "= 0"), r"\[pipeline\]: processes = 0; at least 1"),
        (RUN_TOML.replace('source = "addition"', 'path = "no.jsonl"'), r"no\.jsonl: no such file"),
    ],
)
def test_refuses(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / run_layout.RUN_CONFIG).write_text(text)
    with pytest.raises(ConfigError, match=message):
        main([str(tmp_path)])
