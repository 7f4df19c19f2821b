"""The worker as a process: starts on a run's folder, answers, follows versions, stops cleanly."""

import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GenerateReply, GenerateRequest, Message, SamplingParams
from infra.heartbeats import read_heartbeats
from infra.metrics import MetricsReader
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.text.tokenizer import load_tokenizer
from infra.weights.stored_weights import StoredWeights
from trainer.config import ModelSection
from trainer.inference_worker.main import main, parse_args
from trainer.inference_worker.totals import Totals, rates
from trainer.model.params_io import to_named
from trainer.model.pretrained import cache_folder, load_model, resolve_model

ROOT = Path(__file__).parents[3]
CONFIG = b"""
[run]
name = "test"
[prompts]
source = "addition"
style = "reversed"
[model]
source = "tiny"
[inference]
slots = 8
max_len = 16
prefill_tokens = 32
poll_secs = 0.05
"""
REQUEST = GenerateRequest(
    request_id="r",
    messages=(Message(role="text", content="12+34="),),
    sampling=SamplingParams(n=3, max_new_tokens=4),
    seeds=(1, 2, 3),
    min_version=0,
    timeout_secs=60.0,
)


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "run")
    store.create(run_layout.RUN_CONFIG, CONFIG)
    return store


def publish(store, version, scale=1.0):
    folder = resolve_model(ModelSection(source="tiny"), cache_folder(os.environ))
    _, params = load_model(folder, seed=0)
    arrays = {name: array * np.float32(scale) for name, array in to_named(params).items()}
    digest = load_tokenizer(folder).digest
    return StoredWeights(store, "test").publish(version, arrays, tokenizer_digest=digest)


def start(run, *words):
    command = [sys.executable, "-m", "infra.commands", "serve", str(run), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ask(connection, request):
    connection.request("POST", "/generate", to_json(request))
    response = connection.getresponse()
    body = response.read()
    assert response.status == 200, body
    return from_json(GenerateReply, body)


def test_a_worker_answers_follows_and_stops(store, tmp_path):
    first = publish(store, 0)
    process = start(tmp_path / "run", "--port", "0")
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("serving on http://127.0.0.1:"), process.stderr.read().decode()
        connection = http.client.HTTPConnection("127.0.0.1", int(line.rsplit(":")[-1]), timeout=90)
        reply = ask(connection, REQUEST)
        assert reply.weights == ((0, first.digest),)
        assert [len(s.response_ids) >= 1 for s in reply.samples] == [True] * 3
        again = ask(connection, dataclasses.replace(REQUEST, request_id="again"))
        assert to_json(again.samples[2]) == to_json(reply.samples[2])

        # A request that needs version 1 is sent first: it waits until that is published and pulled.
        newer = dataclasses.replace(REQUEST, request_id="newer", min_version=1)
        connection.request("POST", "/generate", to_json(newer))
        second = publish(store, 1, scale=0.5)
        reply = from_json(GenerateReply, connection.getresponse().read())
        assert reply.weights == ((1, second.digest),)

        connection.request("GET", "/healthz")
        health = json.loads(connection.getresponse().read())
        sync = health.pop("sync_secs")
        assert min(sync.values()) >= 0 and len(sync) == 7
        assert health == {
            "status": "ok",
            "version": 1,
            "digest": second.digest,
            "tokenizer": reply.tokenizer_digest,
            "slots": 8,
            "busy": 0,
            "queued": 0,
            "paused": "",
            "weights": "ok",
        }
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        assert 'headrace_worker_weight_sync_seconds{part="first_token"}' in page

        # What waits at SIGTERM is given its time: here until its own deadline.
        last = dataclasses.replace(REQUEST, request_id="last", min_version=2, timeout_secs=2.0)
        waiting = http.client.HTTPConnection("127.0.0.1", connection.port, timeout=90)
        waiting.request("POST", "/v1/generate", to_json(last))
        while not health["queued"]:
            connection.request("GET", "/healthz")
            health = json.loads(connection.getresponse().read())
        process.send_signal(signal.SIGTERM)
        answer = waiting.getresponse()
        assert answer.status == 503
        assert "needs version 2, the worker has 1" in json.loads(answer.read())["error"]
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()
    assert read_heartbeats(store)["worker"]["state"] == "stopped"
    rows = MetricsReader(store, "worker").poll()
    assert sum(row.get("worker/rollouts", 0) for row in rows) == 9
    synced = {row["worker/weights/version"]: row for row in rows if "worker/weights/version" in row}
    assert sorted(synced) == [0, 1]
    for row in synced.values():
        ways = ("publish", "visible", "fetch", "load", "swap", "first_token")
        parts = [row[f"worker/weights/{way}_secs"] for way in ways]
        assert min(parts) >= 0 and row["worker/weights/sync_secs"] == pytest.approx(sum(parts))


def test_a_taken_port_is_one_line_and_two(store, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(tmp_path / "run", "--port", str(port))
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    lines = errors.decode().splitlines()
    assert len(lines) == 1 and f"cannot listen on 127.0.0.1:{port}" in lines[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no run there"),
        (b"[run", "cannot be read as TOML"),
        (CONFIG.replace(b"slots", b"slotz"), "did you mean 'slots'"),
        (CONFIG.replace(b"slots = 8", b"slots = 1"), "slots = 1; at least 2"),
    ],
)
def test_a_wrong_run_is_one_line(tmp_path, config, message):
    from infra.contracts.errors import ConfigError

    if config is not None:
        LocalStore(tmp_path).create(run_layout.RUN_CONFIG, config)
    with pytest.raises(ConfigError, match=message):
        main([str(tmp_path), "--port", "0"])


def test_options_default_to_the_endpoint_section():
    args = parse_args(["RUN"])
    assert (args.host, args.port, args.version, args.role) == (None, None, None, "worker")


def test_rates_of_an_interval():
    before = Totals(tokens=10, busy_secs=1.0, steps=2, slot_steps=8, rollouts=1, prompt_tokens=5)
    after = Totals(tokens=30, busy_secs=2.0, steps=4, slot_steps=20, rollouts=4, prompt_tokens=9)
    values = rates(before, after, secs=2.0, slots=8)
    assert values == {
        "worker/decode/tokens_per_sec": 10.0,
        "worker/decode/busy_share": 0.5,
        "worker/decode/slot_share": 0.75,
        "worker/prefill/tokens_per_sec": 2.0,
        "worker/requests_expired": 0.0,
        "worker/rollouts": 3.0,
    }
    assert "worker/decode/slot_share" not in rates(after, after, secs=1.0, slots=8)
